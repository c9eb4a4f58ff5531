"""Train a recipe without Ray: `python -m mbd_core.multitf.run --recipe tiny-bd`, in this process alone, or in several:

    torchrun --nproc-per-node 4 -m mbd_core.multitf.run --recipe SDAR-8B-b32 --base DIR --data DIR

`jobs/train_multitf.py` trains the same recipes on a Ray cluster. Exit codes: 0 done, 1 the storage
failed, 2 bad input.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import fsspec
import torch
import typer
from typer.exceptions import TyperException
from typer.main import get_command

from mbd_core.checkpoint.saving import MODEL_KIND
from mbd_core.checkpoint.shipped import named_model
from mbd_core.files import check_target_folder, check_writable, probe_folder
from mbd_core.multitf import config
from mbd_core.multitf.data.encoding import error_sentence
from mbd_core.multitf.data.prepared import named_data
from mbd_core.multitf.recipes.by_name import RECIPES, recipe_named
from mbd_core.multitf.recipes.recipe import with_options, with_precision
from mbd_core.multitf.run.checkpoints import Checkpoints
from mbd_core.multitf.run.log import say
from mbd_core.multitf.run.log_targets import chosen_targets
from mbd_core.multitf.run.options import (
    AttentionName,
    Compiled,
    ComputeAgain,
    CutExperts,
    FittedNoise,
    LogTo,
    Lora,
    MicroBatch,
    Pack,
    PrecisionName,
    Sharding,
    Steps,
    TensorParallel,
)
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.run.worker import settle_precision, train_worker
from mbd_core.multitf.step.memory import fitting, plan_lines, plan_memory
from mbd_core.multitf.step.workers import Workers, torchrun_workers
from mbd_core.ops.machine import free_host_memory
from mbd_core.options import CLUSTER, DATA, MODEL, OUTPUT

Recipe = Annotated[str, typer.Option(help=f"One of {', '.join(sorted(RECIPES))}.", rich_help_panel=MODEL)]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Start from this shipped model or model folder, instead of the recipe's.",
        rich_help_panel=MODEL,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Train on the data that jobs/prepare_data.py wrote there.", rich_help_panel=DATA),
]
Plan = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Print what N GPUs would need of memory, and end.", rich_help_panel=CLUSTER),
]
Out = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Model folder to write.", show_default="out/RECIPE", rich_help_panel=OUTPUT),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace a model folder of this project.", rich_help_panel=OUTPUT),
]
Location = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|URL",
        help="Where checkpoints and losses.jsonl lie; if one is there, go on.",
        rich_help_panel=OUTPUT,
    ),
]
Every = Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.", rich_help_panel=OUTPUT)]


def run(
    recipe: Recipe,
    base: Base = None,
    data: Data = None,
    fitted_noise: FittedNoise = None,
    steps: Steps = None,
    precision: PrecisionName = "auto",
    sharding: Sharding = "auto",
    micro_batch: MicroBatch = None,
    pack: Pack = None,
    again: ComputeAgain = None,
    attention: AttentionName = None,
    compile: Compiled = None,
    lora: Lora = None,
    tensor_parallel: TensorParallel = None,
    cut_experts: CutExperts = None,
    plan: Plan = None,
    out: Out = None,
    overwrite: Overwrite = False,
    checkpoints: Location = None,
    every: Every = 500,
    log_to: LogTo = None,
) -> None:
    """Train a recipe without Ray: in this process, or in those that torchrun started."""
    chosen = with_precision(recipe_named(recipe), precision)
    if base is not None:
        chosen = replace(chosen, base=named_model(base))
    if data is not None:
        chosen = replace(chosen, data=named_data(data))
    chosen = with_options(
        chosen,
        fitted_noise=fitted_noise,
        steps=steps,
        micro_batch=micro_batch,
        pack=pack,
        lora=lora,
        activation_checkpointing=again,
        attention=attention,
        compile=compile,
        tensor_parallel=tensor_parallel,
        cut_experts=cut_experts,
    )
    if plan is not None:
        for workload in StartingPoint.read(chosen).workloads(sharding, num_workers=plan, device="GPU"):
            print("\n".join(plan_lines(workload, plan_memory(workload))))
        return
    log_targets = chosen_targets(log_to)
    if log_to is not None and checkpoints is None:
        raise ValueError(f"--log-to {log_to} needs a folder for the run: name it with --checkpoints")
    if checkpoints is not None:
        check_checkpoints(checkpoints)
    folder = model_target(f"out/{chosen.name}" if out is None else out, overwrite=overwrite)
    start = StartingPoint.read(chosen)
    with torchrun_workers() as workers:
        if workers.is_first and (note := start.note()):
            print(f"note: {note}")
        stored = None if checkpoints is None else Checkpoints(checkpoints, workers, recipe=chosen)
        start = settle_precision(start, workers, stored)
        way = chosen_sharding(start, sharding, workers)
        own = train_worker(start, workers, way, stored, every=every, log_targets=log_targets)
        own.write(folder if workers.is_first else None, overwrite=overwrite)
        if workers.is_first:
            say(f"wrote {folder}")


def model_target(out: str, *, overwrite: bool) -> Path:
    """The model folder to write; `ValueError` if it cannot be written, so that no run trains for nothing."""
    if not out.strip():
        raise ValueError("--out is empty; name a folder, or leave it out")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", out):
        raise ValueError(f"{out} is a URL: this command writes here; jobs/train_multitf.py writes to URLs")
    check_target_folder(Path(out), MODEL_KIND, overwrite=overwrite)
    return Path(out)


def check_checkpoints(location: str) -> None:
    """Raise `ValueError` for a place that cannot be written; at a URL a file is made and removed."""
    if not location.strip():
        raise ValueError("--checkpoints is empty; name a folder or a URL, or leave it out")
    if "://" not in location:
        if Path(location).is_file():
            raise ValueError(f"{location} is a file; give a folder for checkpoints")
        check_writable(Path(location), Path(location))
        return
    try:
        system, path = fsspec.core.url_to_fs(location)
        probe_folder(system, location, path)
    except Exception as error:  # each storage raises types of its own
        raise ValueError(f"{location} cannot be written: {error_sentence(error)}") from error


def chosen_sharding(start: StartingPoint, choice: config.ShardingChoice, workers: Workers) -> config.Sharding:
    """How the weights lie on the workers, whose memory plan is printed; `ValueError` if they do not fit."""
    if workers.device.type == "cuda":
        available, device = torch.cuda.get_device_properties(workers.device).total_memory, "GPU"
    else:
        available, device = free_host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), "CPU"
    workloads = start.workloads(choice, num_workers=workers.size, device=device)
    workload, plan = fitting(workloads, workers.least(available), device=device)
    if workers.is_first:
        print("\n".join(plan_lines(workload, plan, device=device)))
    return workload.sharding


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; bad input, or a storage that fails, is one sentence on stderr and the exit code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        get_command(app).main(arguments, prog_name="python -m mbd_core.multitf.run", standalone_mode=False)
    except (TyperException, ValueError, OSError) as error:
        sentence = error.format_message() if isinstance(error, TyperException) else str(error)
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"multitf.run: {sentence}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
