#!/usr/bin/env python3
"""Train a recipe on Ray: as a job submitted to a cluster's dashboard, or from here on the cluster of RAY_ADDRESS.

    ray job submit --address http://127.0.0.1:8265 --working-dir . -- python jobs/train_multitf.py --recipe tiny-mbd

On a cluster whose nodes have this folder, a job may also call `jobs/train_multitf.py` by its path.
Without a cluster (no RAY_ADDRESS) the job starts a cluster. Exit codes: 0 done, 1 the training failed or no
cluster could be reached, 2 bad input; each failure is one sentence on stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # run by its path, it finds the project's packages beside it
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from jobs.api.training import RayOptions, chosen_on_ray, train_on_ray
from mbd_core.command_line import Changes, command, refuse_given
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.choice import RecipeChoice
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.options import RunOptions
from mbd_core.storage.models import fetch_model


def run(
    choice: RecipeChoice,
    changes: Annotated[dict[str, Any], Changes(TrainingRecipe, default="the recipe's")],
    options: RunOptions,
    own: RayOptions,
) -> None:
    """Train a recipe on Ray: on the cluster of RAY_ADDRESS, or on a cluster that the command starts.

    Data, updates, training states, adapter and computation are the recipe's, unless an option or a file changes them.
    """
    if own.schema:
        refuse_given(run, "with --schema", plan=own.plan)
        from mbd_core.multitf.recipes.choice import config_schema

        print(json.dumps(config_schema(), indent=2))
        return
    if own.plan:
        print_plan(choice, changes, options, own)
        return
    trained = train_on_ray(choice, changes, options, own, say=print)
    print(f"model: {trained.model}")


def print_plan(choice: RecipeChoice, changes: dict[str, Any], options: RunOptions, own: RayOptions) -> None:
    """Print the memory that a step needs on each worker."""
    from mbd_core.multitf.run.start import StartingPoint
    from mbd_core.multitf.step.memory import plan_lines, plan_memory

    kind = "CPU" if own.device == "cpu" else "GPU"
    start = StartingPoint.read(chosen_on_ray(choice, changes).recipe, fetch=fetch_model)
    for workload in start.workloads(options.sharding, num_workers=own.workers, device=kind):
        print("\n".join(plan_lines(workload, plan_memory(workload), device=kind)))


SHOWN = (
    *("recipe", "config", "base", "data", "held_out.validation"),
    *("train.steps", "train.batch_size", "train.lr", "train.seed", "train.precision"),
    *("train.lora.rank", "train.teacher.model", "train.tensor_parallel"),
    *("workers", "device", "sharding", "plan", "schema"),
    *("storage", "run_name", "resume", "out", "overwrite", "write", "log_to"),
)
"""Options that most runs need. `--set` and a file reach all fields, so a new field of a recipe needs no option."""

main = command(
    run,
    shown=SHOWN,
    epilog=f"Recipes: {', '.join(sorted(RECIPES))}.",
    go_on="the same command with --resume goes on from the last checkpoint",
)

if __name__ == "__main__":
    sys.exit(main())
