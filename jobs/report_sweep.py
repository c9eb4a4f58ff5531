"""Report sweeps from their rows alone: no model and no cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.command_line import DATA, OUTPUT, Overwrite, command
from jobs.write_best import WriteBest, written_best
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.files import check_target_folder, folder_beside

if TYPE_CHECKING:
    from mbd_core.evaluation.sweep.best import By

KIND = "sweep report"


def run(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="--out folders of sweeps or of their shards.", rich_help_panel=DATA),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder to write; several sweeps need one.",
            show_default="the sweep's own",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    write_best: WriteBest = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="For --write-best: the folder of a model of the sweep, known by its files; repeatable.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Report sweeps from their rows alone, without a model: one anew, or several joined.

    python jobs/report_sweep.py out/shard-1 out/shard-2 --out out/joined

    Shards of one sweep give the report of the sweep. Sweeps of different models, methods or problems are joined if no
    two of them hold the same sample. A sweep that is not finished is reported as far as it is.
    """
    from mbd_core.evaluation.report.choice import best_points
    from mbd_core.evaluation.report.summary import rewrite_summary, summarize_sweeps
    from mbd_core.evaluation.sweep.folder import REPORT

    targets = best_targets(folders, write_best, folder or [])
    best = [] if write_best is None else best_points(folders, list(targets), write_best)
    if out is None:
        if len(folders) > 1:
            raise ValueError("several sweeps are joined in a folder of their own: give --out")
        summary = rewrite_summary(folders[0])
    else:
        check_target_folder(out, KIND, overwrite=overwrite)
        summary = summarize_sweeps(folders)
        with folder_beside(out, KIND, overwrite=overwrite) as written:
            for name, content in summary.files.items():
                (written / name).write_bytes(content)
    print(summary.text)
    print(f"The report is in {out or folders[0]}: report.md, report.html, {REPORT}, plot.png")
    if summary.num_samples < summary.num_planned:
        print(f"report_sweep: note: {summary.num_samples} of {summary.num_planned} samples are there", file=sys.stderr)
    for point in best:
        print(written_best(targets[point.model], point))


def best_targets(folders: Sequence[Path], by: By | None, model_folders: Sequence[Path]) -> dict[str, Path]:
    """The model folders by the models that they hold; `ValueError` if the options do not go together."""
    from mbd_core.evaluation.report.choice import models_of

    if by is None and model_folders:
        raise ValueError("--folder says where --write-best writes; give it too")
    if by is not None and not model_folders:
        raise ValueError(f"--write-best {by} needs the folder of a model of the sweep: --folder DIR")
    return models_of(folders, [model_folder(str(one)) for one in model_folders])


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
