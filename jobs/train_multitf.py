#!/usr/bin/env python3
"""Train a recipe on Ray, as a job that is submitted to a cluster's dashboard or on the cluster of RAY_ADDRESS.

    ray job submit --address http://127.0.0.1:8265 --working-dir . -- python jobs/train_multitf.py --recipe tiny-mbd

Where the cluster's nodes have this folder, `jobs/train_multitf.py` alone as the command trains the default recipe.
Without a cluster (no RAY_ADDRESS) the job starts one for itself. Exit codes: 0 done, 1 the training failed or no
cluster could be reached, 2 bad input; each failure is one sentence on stderr.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if __name__ == "__main__":  # run by its path, it finds the project's packages beside it
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import typer

from cluster.storage import Folder, fetch_model
from cluster.topology import Device
from jobs.command_line import DATA, MODEL, OUTPUT, Overwrite, command
from mbd_core.multitf.recipes.by_name import RECIPES
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
from mbd_core.options import CLUSTER

if TYPE_CHECKING:
    from actors.training.run import TrainingRun
    from mbd_core.multitf.run.start import StartingPoint

RUNS = "~/mbd-runs"
FAILURE = "failure.txt"

Recipe = Annotated[
    str, typer.Option(metavar="NAME", help="What is trained, and how; the names are below.", rich_help_panel=MODEL)
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Start from this model instead of the recipe's: a shipped model's name, a model folder, or its URL.",
        rich_help_panel=MODEL,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|URL",
        help="Train on the data that jobs/prepare_data.py wrote there, instead of the recipe's.",
        rich_help_panel=DATA,
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Training processes.", rich_help_panel=CLUSTER)]
MaxFailures = Annotated[int, typer.Option(min=0, help="Lost workers the run survives.", rich_help_panel=CLUSTER)]
ComputeOn = Annotated[
    Device | None,
    typer.Option(
        help="What workers compute on.", show_default="a GPU each, if there are any", rich_help_panel=CLUSTER
    ),
]
Plan = Annotated[
    bool,
    typer.Option("--plan", help="Print what a step takes of each worker's memory, and end.", rich_help_panel=CLUSTER),
]
Storage = Annotated[
    str,
    typer.Option(
        metavar="DIR|URL",
        help="Where runs lie: a folder that every worker reaches, or a URL as s3://bucket/path.",
        rich_help_panel=OUTPUT,
    ),
]
RunName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The run's folder in --storage.", show_default="the recipe's", rich_help_panel=OUTPUT
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run of this name.", rich_help_panel=OUTPUT)]
CheckpointEvery = Annotated[
    int, typer.Option(min=1, metavar="N", help="Steps between checkpoints.", rich_help_panel=OUTPUT)
]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|URL", help="Model folder to write.", show_default="STORAGE/NAME/model", rich_help_panel=OUTPUT
    ),
]


def run(
    *,
    recipe: Recipe = "tiny-mbd",
    base: Base = None,
    data: Data = None,
    fitted_noise: FittedNoise = None,
    steps: Steps = None,
    precision: PrecisionName = "auto",
    workers: Workers = 2,
    device: ComputeOn = None,
    sharding: Sharding = "auto",
    micro_batch: MicroBatch = None,
    pack: Pack = None,
    again: ComputeAgain = None,
    attention: AttentionName = None,
    compile: Compiled = None,
    lora: Lora = None,
    tensor_parallel: TensorParallel = None,
    cut_experts: CutExperts = None,
    plan: Plan = False,
    max_failures: MaxFailures = 3,
    storage: Storage = RUNS,
    run_name: RunName = None,
    resume: Resume = False,
    checkpoint_every: CheckpointEvery = 100,
    log_to: LogTo = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Train a recipe on Ray: on the cluster of RAY_ADDRESS, else on one that is started for it."""
    from actors.training.run import TrainingRun, check_run, named_base, prepared_data_at
    from mbd_core.multitf.recipes.by_name import recipe_named
    from mbd_core.multitf.recipes.recipe import with_options, with_precision
    from mbd_core.multitf.run.start import StartingPoint
    from mbd_core.multitf.step.memory import plan_lines, plan_memory

    chosen = with_precision(recipe_named(recipe), precision)
    if base is not None:
        chosen = replace(chosen, base=named_base(base))
    if data is not None:
        chosen = replace(chosen, data=prepared_data_at(data))
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
    if plan:
        kind = "CPU" if device == "cpu" else "GPU"
        start = StartingPoint.read(chosen, fetch=fetch_model)
        for workload in start.workloads(sharding, num_workers=workers, device=kind):
            print("\n".join(plan_lines(workload, plan_memory(workload), device=kind)))
        return
    runs, name = Folder.at(os.path.expanduser(storage)), chosen.name if run_name is None else run_name
    training = TrainingRun(
        recipe=chosen,
        name=name,
        storage=runs,
        out=runs / name / "model" if out is None else Folder.at(out),
        overwrite=overwrite,
        num_workers=workers,
        device=device,
        sharding=sharding,
        checkpoint_every=checkpoint_every,
        max_failures=max_failures,
        log_targets=chosen_targets(log_to),
    )
    check_run(training, resume=resume)
    start = StartingPoint.read(chosen, fetch=fetch_model)
    if note := start.note():
        print(f"note: {note}")
    train_on_cluster(training, start, resume=resume)
    print(f"model: {training.out}")


def train_on_cluster(
    training: TrainingRun, start: StartingPoint, *, resume: bool, go_on: str = "the same command and --resume"
) -> None:
    """Train until the model is written. Raises `RuntimeError`, one sentence, if that fails or no cluster starts.

    `go_on` is what goes on with a training that failed.
    """
    from actors.training.run import begin
    from actors.training.worker import fit, plan_run  # Ray takes seconds to import: bad input is refused before that
    from cluster.failures import CLUSTER_FAILURES, record_failure
    from cluster.local import connect

    connect(num_cpus=max(4, training.num_workers + 1))
    training = plan_run(training, start)
    begin(training, resume=resume)
    try:
        fit(training)
    except CLUSTER_FAILURES as error:
        reason = record_failure(error, training.folder, FAILURE)
        raise RuntimeError(
            f"the training failed: {reason}; the run lies in {training.folder}; go on with {go_on}; the traceback is "
            f"in {FAILURE} there"
        ) from error


main = command(run, epilog=f"Recipes: {', '.join(sorted(RECIPES))}.")

if __name__ == "__main__":
    sys.exit(main())
