"""Grade samples without a model: the options, progress, and the counts."""

import os
import sys
from pathlib import Path
from typing import Annotated

from tqdm import tqdm

from jobs.command_line import IsolationText, OutFolder, Overwrite, command
from mbd_core.evaluation.sandbox.processes import describe_isolation, hide_memory
from mbd_core.evaluation.sweep.grading import grade_samples, load_samples, write_grades
from mbd_core.evaluation.tasks.benchmarks import TASKS, find_task, runs_programs
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.files import check_target_folder, folder_beside
from mbd_core.options import DATA, ENGINE, Option
from mbd_core.tasks.split import Split

KIND = "grades"


def run(
    *,
    task: Annotated[str, Option(f"Task: {', '.join(TASKS)}.", DATA, metavar="NAME")],
    samples: Annotated[Path, Option("One sample a row, in any format that --data has.", DATA, metavar="FILE")],
    data: Annotated[
        str | None,
        Option(
            "The task's problems, as their upstream or the hub has them; not for generated tasks.",
            DATA,
            metavar="PATH|URL",
        ),
    ] = None,
    limit: Annotated[int | None, Option("Problems of a generated task.", DATA, at_least=1)] = None,
    split: Annotated[Split, Option("Split of a generated task.", DATA)] = "test",
    seed: Annotated[int, Option("Of a generated task.", DATA, at_least=0)] = 0,
    workers: Annotated[int | None, Option("Samples graded at once.", ENGINE, at_least=1, default="the CPUs")] = None,
    isolation: IsolationText = "any",
    out: OutFolder,
    overwrite: Overwrite = False,
) -> None:
    """Grade anybody's samples without a model.

    python jobs/grade.py --task humaneval-plus --data HumanEvalPlus.jsonl.gz --samples samples.jsonl --out out/grades

    A sample is a JSON object with `problem_id`, `task_id` or `doc_id` (the problem's number from 0), and the answer:
    `text` is a model's whole answer; for code also `completion` (goes on after the prompt) or `solution` (a whole
    program), which are run as they stand. It writes grades.jsonl, report.json and, for EvalPlus's tasks,
    evalplus.jsonl, which `evalplus.evaluate --samples` takes.
    """
    check_target_folder(out, KIND, overwrite=overwrite)
    task_set = find_task(task)
    problem_set = load_problems(task_set, split=split, seed=seed, limit=limit, data=data)
    task_samples = load_samples(samples, problem_set)
    if runs_programs(task_set):
        print(f"Programs run under {describe_isolation(isolation)}", flush=True)
        hide_memory()
    grades = list(
        tqdm(
            grade_samples(task_set, task_samples, workers=workers or os.cpu_count() or 1),
            total=len(task_samples),
            unit="sample",
            disable=None,
        )
    )
    with folder_beside(out, KIND, overwrite=overwrite) as folder:
        report = write_grades(folder, problem_set, grades)
    parts = [f"{name} {report[name]}" for name in report if name.endswith("_correct")]
    share = f"{report['correct']} of {report['samples']} samples right ({100 * report['accuracy_of_samples']:.2f} %"
    low, high = report["wilson_interval"]
    share += f", 95 % Wilson interval {100 * low:.1f} to {100 * high:.1f})"
    print("; ".join([f"{task_set.label}: {share}", *parts]))
    if report["problems_without_a_sample"]:
        print(f"{report['problems_without_a_sample']} of {report['problems']} problems have no sample")
    print(f"The grades are in {out}: grades.jsonl, report.json")


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
