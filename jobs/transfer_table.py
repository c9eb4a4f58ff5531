"""Decoding settings chosen on one task and used on others: the options of `transfer.py`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.command_line import DATA, command
from mbd_core.evaluation.report.transfer import ChosenBy

Chosen = Annotated[
    list[Path],
    typer.Option("--chosen-on", metavar="DIR", help="A sweep that settings are chosen on.", rich_help_panel=DATA),
]
Reported = Annotated[
    list[Path],
    typer.Option("--reported-on", metavar="DIR", help="A sweep of the same on other problems.", rich_help_panel=DATA),
]
Rule = Annotated[ChosenBy, typer.Option(help="The most accurate setting, or the knee of accuracy against TPF.")]


def run(chosen_on: Chosen, reported_on: Reported, by: Rule = "accuracy") -> None:
    """Decoding settings chosen on one task and used on the others, as a table.

    Both options may be given again: a sweep has all its models on all its tasks, so models with tasks of their own
    are sweeps of their own.
    """
    from mbd_core.evaluation.report.transfer import transfer_table

    print(transfer_table(chosen_on, reported_on, by=by))


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
