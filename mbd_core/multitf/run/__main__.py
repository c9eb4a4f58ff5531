"""Train a recipe without Ray: `python -m mbd_core.multitf.run --recipe tiny-bd`, in this process alone, or in several:

    torchrun --nproc-per-node 4 -m mbd_core.multitf.run --recipe SDAR-8B-b32 --base DIR --data DIR

`jobs/train_multitf.py` trains the same recipes on a Ray cluster. Exit codes: 0 done, 1 the storage
failed, 2 bad input.
"""

import sys
from typing import Annotated, Any

from mbd_core.command_line import Changes, command
from mbd_core.multitf.recipes.choice import RecipeChoice
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.alone import PlainOptions, chosen_here, train_alone
from mbd_core.multitf.run.options import RunOptions
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.step.memory import plan_lines, plan_memory


def run(
    choice: RecipeChoice,
    changes: Annotated[dict[str, Any], Changes(TrainingRecipe, default="the recipe's")],
    options: RunOptions,
    plain: PlainOptions,
) -> None:
    """Train a recipe without Ray: in this process, or in the processes that torchrun started."""
    if plain.plan is None:
        train_alone(choice, changes, options, plain)
        return
    start = StartingPoint.read(chosen_here(choice, changes).recipe)
    for workload in start.workloads(options.sharding, num_workers=plain.plan, device="GPU"):
        print("\n".join(plan_lines(workload, plan_memory(workload))))


SHOWN = (
    *("recipe", "config", "base", "data", "held_out.validation"),
    *("train.steps", "train.batch_size", "train.lr", "train.seed", "train.precision"),
    *("train.lora.rank", "train.teacher.model", "train.tensor_parallel"),
    *("sharding", "plan", "checkpoints", "every", "out", "overwrite", "write", "log_to"),
)
"""The fields that most runs choose; `--set` and a file reach all fields."""

main = command(
    run,
    "python -m mbd_core.multitf.run",
    shown=SHOWN,
    failures=(OSError,),
    go_on="with --checkpoints the same command goes on from the newest checkpoint",
)

if __name__ == "__main__":
    sys.exit(main())
