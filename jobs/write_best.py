"""The option `--write-best` of the commands that report sweeps, and what they say of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.command_line import OUTPUT
from mbd_core.evaluation.sweep.best import By

if TYPE_CHECKING:
    from mbd_core.evaluation.sweep.best import BestPoint

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
    from mbd_core.evaluation.sweep.best_folder import FILE, write_best

    write_best(folder, point)
    return f"\n{point.text}\nIt is the default of {folder / FILE}"
