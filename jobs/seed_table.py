"""Several sweeps that differ in their seed alone, as one table."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.command_line import DATA, command


def run(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="--out folders of sweeps, one a seed.", rich_help_panel=DATA)
    ],
) -> None:
    """Several sweeps that differ in their seed alone, as one table: mean and standard error over the seeds.

    for s in 0 1 2; do python jobs/eval_sweep.py --models ... --tasks ... --seed $s --out out/seed-$s; done;
    python jobs/seed_table.py out/seed-0 out/seed-1 out/seed-2
    """
    from mbd_core.evaluation.report.comparisons import seed_table

    print(seed_table(folders))


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
