"""Whether a model leaves room for the study on ledger-mini: the options, the table, the verdict."""

from typing import Annotated

import typer

from jobs.command_line import DATA, DECODING, ModelName, OwnThreads, Seed, command, numbers
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.evaluation.report.sections import table_line

Problems = Annotated[int, typer.Option(min=1, help="Problems of the valid split.", rich_help_panel=DATA)]
Tau = Annotated[float, typer.Option("--tau-m2t", help="The threshold.", rich_help_panel=DECODING)]
Buffers = Annotated[str, typer.Option(metavar="N,...", help="Slots beside SingleBD's one.", rich_help_panel=DECODING)]
HEADS = ("Slots", "n", "Accuracy [95 %]", "Decoding forwards a block", "At the floor", "TPF")


def run(
    model: ModelName,
    problems: Problems = 500,
    tau: Tau = 0.9,
    buffers: Buffers = "1",
    seed: Seed = 0,
    threads: OwnThreads = None,
) -> int:
    """Whether a model leaves room for the study on ledger-mini (research/README.md); exit code 1 if it does not.

    Asked of SingleBD: accuracy of 70 to 92 %, at least 4 decoding forwards a block, fewer than 20 % of the answers at
    the least possible number of forwards.
    """
    import torch

    from research.ledger.depth_gate import measure_gate

    sizes = (1, *(size for size in numbers(buffers, "--buffers") if size > 1))
    if not 0.0 < tau < 1.0:
        raise ValueError(f"--tau-m2t {tau:g} must lie between 0 and 1")
    folder = model_folder(model)
    if threads is not None:
        torch.set_num_threads(threads)
    found = measure_gate(folder, problems=problems, tau=tau, buffer_sizes=sizes, seed=seed)
    lines = [table_line(HEADS), "|" + "---:|" * len(HEADS)]
    for one in found:
        accuracy = f"{one.accuracy:.1f} [{one.accuracy_low:.1f}, {one.accuracy_high:.1f}]"
        cells = [one.buffer_size, one.n, accuracy, f"{one.depth:.2f}", f"{100 * one.at_floor:.1f} %", f"{one.tpf:.2f}"]
        lines.append(table_line(cells))
    failures = found[0].failures
    print("\n".join([*lines, "", f"the gate is not met: {'; '.join(failures)}" if failures else "the gate is met"]))
    return 1 if failures else 0


main = command(run, "python -m research gate")
