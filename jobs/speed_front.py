"""The Pareto front of a sweep into a model folder, where requests with `speed` find it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.command_line import DATA, MODEL, OUTPUT, command, names
from mbd_core.checkpoint.shipped import model_folder


def run(
    sweep: Annotated[Path, typer.Argument(metavar="DIR", help="--out folder of a sweep.", rich_help_panel=DATA)],
    folder: Annotated[
        str, typer.Option(metavar="DIR", help="The model folder that gets the front.", rich_help_panel=OUTPUT)
    ],
    model: Annotated[
        str | None,
        typer.Option(help="The model's name in the sweep.", show_default="its only one", rich_help_panel=MODEL),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Tasks to take the means of.", show_default="all", rich_help_panel=DATA),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a front that the folder has.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Write the Pareto front of a sweep (accuracy against tokens per forward) into a model's generation_config.json.

    python jobs/eval_sweep.py --models out/model --tasks gsm-mini --grid "tau_m2t=0.5,0.7,0.9;buffer_size=1,2,4"
    --out out/sweep; python jobs/speed_front.py out/sweep --folder out/model

    A server that loads the folder then takes "speed" in requests: 0 is the front's most accurate point, 1 its fastest.
    """
    from mbd_core.evaluation.report.choice import front_of, front_table, write_front
    from mbd_core.evaluation.sweep.folder import read_report

    chosen = () if tasks is None else names(tasks, "--tasks")
    front = front_of(read_report(sweep), model=model, tasks=chosen)
    write_front(model_folder(folder), front, overwrite=overwrite)
    print(front_table(front))


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
