#!/usr/bin/env python3
"""Train a recipe on Ray, as a job that is submitted to a cluster's dashboard or on the cluster of RAY_ADDRESS.

    ray job submit --address http://127.0.0.1:8265 --working-dir . -- python jobs/train_multitf.py --recipe tiny-mbd

Where the cluster's nodes have this folder, `jobs/train_multitf.py` alone as the command trains the default recipe.
Without a cluster (no RAY_ADDRESS) the job starts one for itself. Exit codes: 0 done, 1 the training failed or no
cluster could be reached, 2 bad input; each failure is one sentence on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __name__ == "__main__":  # run by its path, it finds the project's packages beside it
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from cluster.storage import Folder, fetch_model
from cluster.topology import Device
from jobs.command_line import Changes, command
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.choice import RecipeChoice, choose_recipe
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.log_targets import chosen_targets
from mbd_core.multitf.run.options import RunOptions
from mbd_core.options import CLUSTER, OUTPUT, Option

if TYPE_CHECKING:
    from actors.training.run import TrainingRun
    from mbd_core.multitf.run.start import StartingPoint

FAILURE = "failure.txt"


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """What this command alone has."""

    workers: Annotated[int, Option("Training processes.", CLUSTER, at_least=1)] = 2
    device: Annotated[
        Device | None, Option("What workers compute on.", CLUSTER, default="a GPU each, if there are any")
    ] = None
    plan: Annotated[bool, Option("Print what a step takes of each worker's memory, and end.", CLUSTER)] = False
    schema: Annotated[bool, Option("Print the JSON Schema of --config files, for editors, and end.", OUTPUT)] = False
    max_failures: Annotated[int, Option("Lost workers the run survives.", CLUSTER, at_least=0)] = 3
    storage: Annotated[
        str,
        Option(
            "Where runs lie: a folder that every worker reaches, or a URL as s3://bucket/path.",
            OUTPUT,
            metavar="DIR|URL",
        ),
    ] = "~/mbd-runs"
    run_name: Annotated[
        str | None, Option("The run's folder in --storage.", OUTPUT, metavar="NAME", default="the recipe's")
    ] = None
    resume: Annotated[bool, Option("Go on with the run of this name.", OUTPUT)] = False
    checkpoint_every: Annotated[int, Option("Steps between checkpoints.", OUTPUT, at_least=1, metavar="N")] = 100
    out: Annotated[
        str | None, Option("Model folder to write.", OUTPUT, metavar="DIR|URL", default="STORAGE/NAME/model")
    ] = None


def run(
    choice: RecipeChoice,
    changes: Annotated[dict[str, Any], Changes(TrainingRecipe)],
    options: RunOptions,
    own: RayOptions,
) -> None:
    """Train a recipe on Ray: on the cluster of RAY_ADDRESS, else on one that is started for it.

    Data, updates, training states, adapter and computation are the recipe's where no option or file changes them.
    """
    if own.schema:
        from mbd_core.multitf.recipes.config_schema import config_schema

        print(json.dumps(config_schema(), indent=2))
        return
    from actors.training.run import TrainingRun, check_run, fetched, named_base, prepared_data_at, validation_at
    from mbd_core.evaluation.tasks.benchmarks import find_task
    from mbd_core.evaluation.tasks.problems import load_problems
    from mbd_core.multitf.run.start import StartingPoint
    from mbd_core.multitf.run.validation import check_held_out
    from mbd_core.multitf.step.memory import plan_lines, plan_memory

    chosen = choose_recipe(choice, changes, default="tiny-mbd", named_base=named_base, named_data=prepared_data_at)
    recipe = chosen.recipe
    if own.plan:
        kind = "CPU" if own.device == "cpu" else "GPU"
        start = StartingPoint.read(recipe, fetch=fetch_model)
        for workload in start.workloads(options.sharding, num_workers=own.workers, device=kind):
            print("\n".join(plan_lines(workload, plan_memory(workload), device=kind)))
        return
    runs, name = Folder.at(os.path.expanduser(own.storage)), recipe.name if own.run_name is None else own.run_name
    training = TrainingRun(
        recipe=recipe,
        changes=chosen.changes,
        name=name,
        storage=runs,
        out=runs / name / "model" if own.out is None else Folder.at(own.out),
        written=options.write,
        overwrite=options.overwrite,
        num_workers=own.workers,
        device=own.device,
        sharding=options.sharding,
        checkpoint_every=own.checkpoint_every,
        max_failures=own.max_failures,
        log_targets=chosen_targets(options.log_to),
        measuring=options.measuring,
        validation=validation_at(options.held_out),
        sweeping=options.sweeping,
    )
    if options.sweeping.sweep_every:
        task = find_task(options.sweeping.task)
        load_problems(task, limit=options.sweeping.limit, data=options.sweeping.sweep_data)  # refused before the run
    check_run(training, resume=own.resume)
    start = StartingPoint.read(recipe, fetch=fetch_model)
    start.check_written(options.write)
    check_held_out(fetched(training.validation), start, None if start.base is None else start.base.tokenizer)
    if note := start.note():
        print(f"note: {note}")
    train_on_cluster(training, start, resume=own.resume)
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
