"""The option `--write-best` of the commands that report sweeps, and what they say of it."""

from pathlib import Path
from typing import Annotated

import typer

from jobs.command_line import OUTPUT
from mbd_core.evaluation.best_folder import FILE, write_best
from mbd_core.evaluation.best_point import BestPoint, By

WriteBest = Annotated[
    By | None,
    typer.Option(
        "--write-best",
        help="Write each model's best configuration into its generation_config.json: the most accurate one, the one "
        "of the highest TPS at most 5 points below, or the knee of the front of accuracy against TPF. It is chosen on "
        "half of the problems, and its accuracy on the others is printed.",
        rich_help_panel=OUTPUT,
    ),
]


def written_best(folder: Path, point: BestPoint) -> str:
    """Write a chosen configuration into its model's folder; what was chosen, and where it is."""
    write_best(folder, point)
    return f"\n{point.text}\nIt is the default of {folder / FILE}"
