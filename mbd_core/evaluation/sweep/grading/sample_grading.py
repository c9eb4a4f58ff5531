"""Grades samples from other sources: rows of a file and a task's problems in, grades and a summary out."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mbd_core.evaluation.measures.statistics import mean_interval, wilson_interval
from mbd_core.evaluation.sandbox.processes import available_isolation
from mbd_core.evaluation.tasks.kinds.task import Grade, Problem, Task, ungradable
from mbd_core.evaluation.tasks.problems import ProblemSet
from mbd_core.files import write_json, write_text
from mbd_core.row_files.paths import read_row_files

SampleForm = Literal["text", "completion", "solution"]
FORMS: tuple[SampleForm, ...] = ("solution", "completion", "text")
IDS = ("problem_id", "task_id", "question_id", "doc_id")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer. The form `text` is a model's whole answer. For code, `completion` continues the prompt, and
    `solution` is a complete program; both are run unchanged, as EvalPlus runs them."""

    line: int
    problem: Problem
    form: SampleForm
    content: str


@dataclass(frozen=True, kw_only=True)
class SampleGrade:
    """A sample with its grade; `solution` is the program that was run, for code."""

    sample: Sample
    grade: Grade
    solution: str | None


def load_samples(path: Path, problem_set: ProblemSet) -> list[Sample]:
    """The samples of a file, of any format that `read_row_files` reads. Raises `ValueError` that names a row without a
    sample."""
    by_id = {problem.problem_id: problem for problem in problem_set.problems}
    samples: list[Sample] = []
    for number, place, row in read_row_files(str(path)):
        try:
            samples.append(_sample(number, row, problem_set, by_id))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    if not samples:
        raise ValueError(f"{path} holds no samples")
    return samples


def read_samples(rows: Sequence[Mapping[str, Any]], problem_set: ProblemSet) -> list[Sample]:
    """The samples of rows. Raises `ValueError` that names a row without a sample, and says why."""
    by_id = {problem.problem_id: problem for problem in problem_set.problems}
    samples: list[Sample] = []
    for number, row in enumerate(rows, start=1):
        try:
            samples.append(_sample(number, row, problem_set, by_id))
        except ValueError as error:
            raise ValueError(f"samples, row {number}: {error}") from None
    return samples


def _sample(line: int, row: Mapping[str, Any], problem_set: ProblemSet, by_id: dict[str, Problem]) -> Sample:
    programs = problem_set.task.grader.programs
    forms = FORMS if programs else FORMS[-1:]
    if programs and not programs.completes:
        forms = tuple(form for form in forms if form != "completion")
    row = {column: value for column, value in row.items() if value is not None}  # tables pad rows with null
    form = next((form for form in forms if form in row), None)
    if form is None:
        fields = " or ".join(f"'{field}'" for field in forms)
        raise ValueError(f"no column {fields} with the answer")
    if not isinstance(row[form], str):
        raise ValueError(f"column '{form}' must be text, not {type(row[form]).__name__}")
    name = next((name for name in IDS if name in row), None)
    if name is None:
        raise ValueError(f"no column that names the problem: {', '.join(IDS)} (counted from 0)")
    return Sample(line=line, problem=_problem(name, row[name], problem_set, by_id), form=form, content=row[form])


def _problem(name: str, value: Any, problem_set: ProblemSet, by_id: dict[str, Problem]) -> Problem:
    problems = problem_set.problems
    if name == "doc_id" and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(problems):
        return problems[value]
    if name != "doc_id" and str(value) in by_id:
        return by_id[str(value)]
    raise ValueError(f"{name} {value!r} is no problem of task '{problem_set.task.name}' in {problem_set.source}")


def grade_samples(task: Task, samples: Sequence[Sample], *, workers: int) -> Iterator[SampleGrade]:
    """Grade all samples with `workers` threads. The grades of one problem come one after the other."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.problem.problem_id, []).append(sample)
    with ThreadPoolExecutor(workers) as pool:
        for grades in pool.map(lambda group: [_grade_sample(task, sample) for sample in group], groups.values()):
            yield from grades


def _grade_sample(task: Task, sample: Sample) -> SampleGrade:
    if not task.runs_programs:
        return SampleGrade(sample=sample, grade=task.grade(sample.problem, sample.content), solution=None)
    solution = sample.content if sample.form != "completion" else sample.problem.prompt + sample.content
    try:
        if sample.form == "text":
            solution = task.program_in(sample.problem, sample.content)
        outcome = task.grade_program(sample.problem, solution)
    except Exception as error:  # one sample, or a broken problem, must not lose the work of all others
        outcome = ungradable(error)
    return SampleGrade(sample=sample, grade=outcome, solution=solution)


def summary(problem_set: ProblemSet, sample_grades: Sequence[SampleGrade]) -> dict[str, Any]:
    """The counts, and the versions and settings that they depend on."""
    programs = problem_set.task.grader.programs
    grades = [item.grade for item in sample_grades]
    counts = {
        name: sum(bool(getattr(grade, name)) for grade in grades)
        for name in ("strict_correct", "flexible_correct", "base_correct", "plus_correct")
        if any(getattr(grade, name) is not None for grade in grades)
    }
    correct = sum(grade.correct for grade in grades)
    reasons = [str(grade.reason) for grade in grades]
    return {
        "task": problem_set.task.name,
        "rule": problem_set.task.grader.rule,
        "source": problem_set.source,
        "problems": len(problem_set.problems),
        "problems_sha256": problem_set.sha256,
        "problems_without_a_sample": len(problem_set.problems)
        - len({g.sample.problem.problem_id for g in sample_grades}),
        "samples": len(grades),
        "correct": correct,
        "accuracy_of_samples": correct / len(grades),
        **_interval(sample_grades),
        **counts,
        **({"by": _by_kind(programs.kinds, sample_grades)} if programs and programs.kinds else {}),
        "reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "isolation": available_isolation() if problem_set.task.runs_programs else None,
        "versions": {name: version(name) for name in ("math-verify", "sympy", "numpy")},
    }


def _interval(sample_grades: Sequence[SampleGrade]) -> dict[str, tuple[float, float]]:
    """The accuracy's 95 % interval: Wilson's, or, as several samples of a problem are not independent, a bootstrap
    over the problems."""
    problems = [item.sample.problem.problem_id for item in sample_grades]
    flags = [item.grade.correct for item in sample_grades]
    if 1 < len(set(problems)) < len(problems):
        return {"bootstrap_interval": mean_interval(np.array(flags, dtype=float), problems).bounds}
    return {"wilson_interval": wilson_interval(sum(flags), len(flags))}


def _by_kind(
    kinds: Callable[[Problem], tuple[str, ...]], sample_grades: Sequence[SampleGrade]
) -> dict[str, dict[str, int]]:
    """For each kind of problem, the number of samples and the number of right samples."""
    counts: dict[str, dict[str, int]] = {}
    for item in sample_grades:
        for kind in kinds(item.sample.problem):
            count = counts.setdefault(kind, {"samples": 0, "correct": 0})
            count["samples"] += 1
            count["correct"] += item.grade.correct
    return dict(sorted(counts.items()))


def write_grades(folder: Path, problem_set: ProblemSet, sample_grades: Sequence[SampleGrade]) -> dict[str, Any]:
    """Write `grades.jsonl` in the samples' order, `report.json`, and for code `evalplus.jsonl`, which
    `evalplus.evaluate` takes. Returns the summary."""
    grades = sorted(sample_grades, key=lambda item: item.sample.line)
    rows = [
        {"line": item.sample.line, "problem_id": item.sample.problem.problem_id, **asdict(item.grade)}
        for item in grades
    ]
    write_text(folder / "grades.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    programs = problem_set.task.grader.programs
    if programs and programs.sample_file:
        samples = [{"task_id": item.sample.problem.problem_id, "solution": item.solution} for item in grades]
        write_text(folder / programs.sample_file, "".join(json.dumps(row) + "\n" for row in samples))
    report = summary(problem_set, grades)
    write_json(folder / "report.json", report)
    return report
