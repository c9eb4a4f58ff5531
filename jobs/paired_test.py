"""Two models on the same problems: how often only one of them is right, and how their tokens per forward differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.command_line import DATA, DECODING, MODEL, command


def run(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="--out folders of the sweeps of both models.", rich_help_panel=DATA),
    ],
    first: Annotated[str, typer.Option(help="A model's name in the sweeps.", rich_help_panel=MODEL)],
    second: Annotated[str, typer.Option(help="The other model's name.", rich_help_panel=MODEL)],
    task: Annotated[str, typer.Option(help="The task.", rich_help_panel=DATA)],
    tau_m2t: Annotated[float, typer.Option(help="The configuration's threshold.", rich_help_panel=DECODING)],
    buffer_size: Annotated[int, typer.Option(help="The configuration's slots.", rich_help_panel=DECODING)],
) -> None:
    """Two models on the same problems: how often only one of them is right, and how their tokens per forward differ.

    python jobs/paired_test.py --first tiny-mbd --second tiny-tf --task gsm-mini --tau-m2t 0.9 --buffer-size 4
    out/seed-0 out/seed-1 out/tf-0 out/tf-1

    The answers are matched by seed and problem, so both models are swept with the same seeds. A difference is the
    first model's mean minus the second's, with the 95 % interval of a bootstrap over the problems. Answers to one
    problem under several seeds count together.
    """
    from mbd_core.evaluation.report.comparisons import load_answers, pair_answers

    sides = (
        load_answers(folders, model=model, task=task, tau_m2t=tau_m2t, buffer_size=buffer_size)
        for model in (first, second)
    )
    pairs = pair_answers(*sides)
    print(f"{pairs.num_problems} problems; only {first} right: {pairs.first_only}, only {second}: {pairs.second_only}")
    print(f"sign test, two-sided: p = {pairs.p_value:.3f}")
    print(f"accuracy: {pairs.accuracy.text('+.2f')} points")
    for name, difference in (("TPF", pairs.tpf), ("NFE", pairs.nfe)):
        if difference is not None:
            print(f"{name}: {difference.text('+.3f')}, over the {pairs.num_decoded} answers that both decoded")


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
