"""`grade(task, samples)` grades anybody's samples without a model. The command `mbd grade` calls it."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

from tqdm import tqdm

from jobs.api.call_options import IsolationOption, Say, options_from, silent
from jobs.api.rows import rows_of, table_of
from mbd_core.evaluation.sandbox.processes import describe_isolation, hide_memory
from mbd_core.evaluation.sweep.grading.sample_grading import (
    SampleGrade,
    grade_samples,
    load_samples,
    read_samples,
    summary,
    write_grades,
)
from mbd_core.evaluation.tasks.benchmarks import TASKS, find_task
from mbd_core.evaluation.tasks.kinds.task import Task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.fields import DATA, ENGINE, OUTPUT, Flag, Ge, configuration
from mbd_core.files import check_target_folder, folder_beside
from mbd_core.tasks.split import Split

KIND = "grades"


@dataclass(frozen=True, kw_only=True)
class Grades:
    """Graded samples.

    report  the content of report.json: the counts, and everything they depend on
    folder  the folder that was written, if any
    """

    task: Task = field(repr=False)
    report: dict[str, Any]
    grades: tuple[SampleGrade, ...] = field(repr=False)
    folder: Path | None = None

    @property
    def accuracy(self) -> float:
        """The fraction of right samples."""
        return float(self.report["accuracy_of_samples"])

    @property
    def table(self) -> Any:
        """One row per sample, in the samples' order: a pandas table if pandas is installed, else a list."""
        return table_of(
            [
                {"line": item.sample.line, "problem_id": item.sample.problem.problem_id, **asdict(item.grade)}
                for item in self.grades
            ]
        )

    @property
    def text(self) -> str:
        """The counts in at most two lines."""
        report = self.report
        parts = [f"{name} {report[name]}" for name in report if name.endswith("_correct")]
        share = f"{report['correct']} of {report['samples']} samples right ({100 * self.accuracy:.2f} %"
        name = next(name for name in ("wilson_interval", "bootstrap_interval") if name in report)
        low, high = report[name]
        kind = "Wilson interval" if name == "wilson_interval" else "interval over problems"
        share += f", 95 % {kind} {100 * low:.1f} to {100 * high:.1f})"
        text = "; ".join([f"{self.task.label}: {share}", *parts])
        if report["problems_without_a_sample"]:
            text += f"\n{report['problems_without_a_sample']} of {report['problems']} problems have no sample"
        return text


@configuration(panel=DATA)
class GradeOptions:
    """How samples are graded."""

    task: Annotated[str, Flag(help=f"Task: {', '.join(TASKS)}.", metavar="NAME")]
    data: Annotated[str | None, Flag(metavar="PATH|URL")] = None
    """The task's problems in the format of their publisher or of the hub; not for generated tasks."""
    limit: Annotated[int | None, Ge(1), Flag(default="500 generated, all of a file")] = None
    """Problems, the first of the task."""
    split: Split = "test"
    """Split of a generated task."""
    seed: Annotated[int, Ge(0)] = 0
    """Random seed of a generated task."""
    workers: Annotated[int | None, Ge(1), Flag(panel=ENGINE, default="the CPUs")] = None
    """Samples graded at once."""
    isolation: IsolationOption = "any"
    overwrite: Annotated[bool, Flag(panel=OUTPUT)] = False
    """Replace a folder that this command wrote before."""


class GradeKeywords(TypedDict, total=False):
    """The fields of `GradeOptions`, for editors."""

    data: str | Path | None
    limit: int | None
    split: Split
    seed: int
    workers: int | None
    isolation: Literal["any", "required"]
    overwrite: bool


def grade(
    task: str,
    samples: Any,
    *,
    out: str | Path | None = None,
    say: Say = silent,
    **options: Unpack[GradeKeywords],
) -> Grades:
    """Grade samples of a task's problems; the options are those of the command `mbd grade`.

    samples  a file of JSON lines, or rows: a list of dictionaries, or a table of pandas, polars, Arrow or datasets.
             A sample has `problem_id`, `task_id` or `doc_id`, and `text`, `completion` or `solution`
    out      a folder that gets grades.jsonl and report.json; default: nothing is written
    say      a function that is called with each remark

    Raises `ValueError` for an unknown task or malformed samples.
    """
    own = options_from(GradeOptions, {"task": task, **options})
    return grade_chosen(own, samples, folder=None if out is None else Path(out), say=say)


def grade_chosen(own: GradeOptions, samples: Any, *, folder: Path | None, say: Say) -> Grades:
    """`grade`, with options that are built already."""
    if folder is not None:
        check_target_folder(folder, KIND, overwrite=own.overwrite)
    found = find_task(own.task)
    for name in ("split", "seed") if found.generate is None else ():
        if getattr(own, name) != getattr(GradeOptions, name):
            raise ValueError(f"--{name} has no meaning with --task {own.task}, which is not generated; leave it out")
    problem_set = load_problems(found, split=own.split, seed=own.seed, limit=own.limit, data=own.data)
    if isinstance(samples, str | Path):
        task_samples = load_samples(Path(samples), problem_set)
    else:
        task_samples = read_samples(rows_of(samples, "samples"), problem_set)
    if found.runs_programs:
        say(f"Programs run under {describe_isolation(own.isolation)}")
        hide_memory()
    graded = grade_samples(found, task_samples, workers=own.workers or os.cpu_count() or 1)
    grades = list(tqdm(graded, total=len(task_samples), unit="sample", disable=None))
    if folder is None:
        report = summary(problem_set, grades)
    else:
        with folder_beside(folder, KIND, overwrite=own.overwrite) as new_folder:
            report = write_grades(new_folder, problem_set, grades)
    ordered = sorted(grades, key=lambda item: item.sample.line)
    return Grades(task=found, report=report, grades=tuple(ordered), folder=folder)
