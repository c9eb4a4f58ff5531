"""gsm-mini test problems whose arithmetic chain occurs in training, and the accuracy without them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.command_line import DATA, command


def run(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="--out folders of sweeps with gsm-mini.", rich_help_panel=DATA),
    ],
) -> None:
    """How many gsm-mini test problems have an arithmetic chain that occurs in training, and the accuracy without them.

    A chain is all of an answer's equations in order, whatever the words around them. The sweeps' problems and the
    training problems of every recipe that has them are drawn again.
    """
    from mbd_core.evaluation.report.comparisons import overlap_table, training_chains
    from mbd_core.multitf.data.prepared import TinyData
    from mbd_core.multitf.recipes.by_name import RECIPES

    generated = [recipe.data for recipe in RECIPES.values() if isinstance(recipe.data, TinyData)]
    streams = {(data.seed, data.per_task) for data in generated}
    print(overlap_table(folders, training_chains(streams)))


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
