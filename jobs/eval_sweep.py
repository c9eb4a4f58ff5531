"""Sweep models x methods x thresholds over tasks on Ray Data: the options, and what is printed."""

from __future__ import annotations

import sys
from typing import Annotated

from jobs.api.call_options import OF_VARIABLE
from jobs.api.sweeping import ENGINE_FIELDS, SweepWork, sweep_chosen
from mbd_core.command_line import Fields, command
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.fields import OUTPUT, Flag
from mbd_core.storage.folder import Folder


def run(
    options: SweepOptions,
    engine: Annotated[EngineConfig, Fields(*ENGINE_FIELDS)],
    own: SweepWork,
    *,
    out: Annotated[
        str, Flag("Folder to write, or a URL as s3://bucket/path.", OUTPUT, metavar="DIR|URL", opened_by="job")
    ],
) -> None:
    """Sweep models x methods x thresholds over tasks on Ray Data, and report accuracy, TPF, AUP and speed.

    A method has a name (decoding/blocks/methods.py), or --method defines it by decoding fields. A grid varies fields,
    also fields inside fields: --method 'mine={"t2t": {"max_edits": 8}}' --methods t2t,mine
    --grid "t2t.tau=0.3,0.5;buffer_size=2,4"

    It runs on the cluster of RAY_ADDRESS, which a submitted job has (with an absolute --out), or starts a cluster.
    The same command again computes only the missing rows. --overwrite replaces a finished or a different sweep.
    """
    from mbd_core.evaluation.sweep.folder import REPORT

    place = Folder.at(out)
    result = sweep_chosen(options, engine, own, place=place, cluster=OF_VARIABLE, say=print_remark)
    if not result.report:
        return
    print(f"{result.headlines}\nThe report is in {place}: report.md, report.html, {REPORT}, plot.png, samples/")
    for line in result.best:
        print(line)


def print_remark(text: str) -> None:
    print(f"eval_sweep: {text}", file=sys.stderr)


main = command(run, go_on="the same command computes the missing rows")

if __name__ == "__main__":
    sys.exit(main())
