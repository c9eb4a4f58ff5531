"""Ledger-mbd learns from ten thousand and a hundred thousand answers: rewards beside a teacher and right solutions.

The arms of `rl/arms.py` had 320 answers, and their updates 64. Here an update has 512 answers to 64 problems that no
model was trained on, and the learning rate falls to 0. An arm has 10,240 answers; `long-A` has ten times as many, at
a third of the rate.
"""

from typing import Annotated

from jobs.command_line import OutFolder, OwnThreads
from mbd_core.command_line import command, refuse_given
from mbd_core.fields import MODEL, OUTPUT, Flag
from research.rl.long_arms import LONG_ARMS, STARTS
from research.rl.study import ArmStudySize, compute_arms

SIZE = ArmStudySize(seeds=(1, 2, 3), problems=300, taus=(0.7, 0.8, 0.85, 0.9, 0.95))
CHOICE = f"Train these arms alone: {', '.join(LONG_ARMS)}."


def run(
    *,
    out: OutFolder,
    size: ArmStudySize = SIZE,
    arms: Annotated[tuple[str, ...], Flag(CHOICE, MODEL, metavar="NAME,...", commas=True, default="all")] = (),
    threads: OwnThreads = None,
    report_only: Annotated[bool, Flag("Write the report again, from the rows that are there.", OUTPUT)] = False,
) -> None:
    """Train ledger-mbd by rewards, by itself at one slot and by right solutions, each on 10,240 answers or more.

    The same command computes what is missing. If it runs twice at once, both share the work.
    """
    from research.rl.long_report import report

    if unknown := [name for name in arms if name not in LONG_ARMS]:
        raise ValueError(f"--arms {unknown[0]} is no arm; choose of {', '.join(LONG_ARMS)}")
    if report_only:
        refuse_given(run, "with --report-only", threads=threads, arms=arms, **vars(size))
    else:
        compute_arms(out, LONG_ARMS, size, threads, only=arms, starts=STARTS)
    print(report(out))


main = command(run, "python -m research long", go_on="the same command computes what is missing")
