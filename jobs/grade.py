"""Grade samples without a model: the options, and the counts."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from jobs.api.grading import GradeOptions, grade_chosen
from jobs.command_line import OutFolder
from mbd_core.command_line import command
from mbd_core.fields import DATA, Flag


def run(
    options: GradeOptions,
    *,
    samples: Annotated[Path, Flag("One sample a row, in any format that --data has.", DATA, metavar="FILE")],
    out: OutFolder,
) -> None:
    """Grade anybody's samples without a model.

    python jobs/grade.py --task humaneval-plus --data HumanEvalPlus.jsonl.gz --samples samples.jsonl --out out/grades

    A sample is a JSON object with `problem_id`, `task_id` or `doc_id` (the problem's number from 0), and the answer:
    `text` is a model's whole answer. Code may also be `completion` (it continues the prompt) or `solution` (a whole
    program); both run unchanged. The command writes grades.jsonl, report.json and, for EvalPlus's tasks,
    evalplus.jsonl, which `evalplus.evaluate --samples` takes.
    """
    grades = grade_chosen(options, samples, folder=out, say=partial(print, flush=True))
    print(grades.text)
    print(f"The grades are in {out}: grades.jsonl, report.json")


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
