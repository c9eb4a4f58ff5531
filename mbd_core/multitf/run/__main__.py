"""Train a recipe without Ray: `python -m mbd_core.multitf.run --recipe tiny-bd`, in this process alone, or in several:

    torchrun --nproc-per-node 4 -m mbd_core.multitf.run --recipe SDAR-8B-b32 --base DIR --data DIR

`jobs/train_multitf.py` trains the same recipes on a Ray cluster. Exit codes: 0 done, 1 the storage
failed, 2 bad input.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from mbd_core.json_text import merge_paths
from mbd_core.multitf.recipes.choice import RecipeChoice
from mbd_core.multitf.recipes.recipe import TrainingRecipe
from mbd_core.multitf.run.alone import PlainOptions, chosen_here, train_alone
from mbd_core.multitf.run.options import CommandLine, RunOptions, build_options, options_inside
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.step.memory import plan_lines, plan_memory
from mbd_core.options import changes_of


def run(choice: RecipeChoice, changes: dict[str, Any], options: RunOptions, plain: PlainOptions) -> None:
    """Train a recipe without Ray: in this process, or in those that torchrun started."""
    if plain.plan is None:
        train_alone(choice, changes, options, plain)
        return
    start = StartingPoint.read(chosen_here(choice, changes).recipe)
    for workload in start.workloads(options.sharding, num_workers=plain.plan, device="GPU"):
        print("\n".join(plan_lines(workload, plan_memory(workload))))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; bad input, or a storage that fails, is one sentence on stderr and the exit code."""
    changes = [*changes_of(TrainingRecipe)]
    items = [item for kind in (RecipeChoice, RunOptions, PlainOptions) for item in options_inside(kind)]
    line = CommandLine("python -m mbd_core.multitf.run", run.__doc__ or "", [*items, *changes])
    try:
        named_values = line.read(sys.argv[1:] if argv is None else argv)
        values = {item.name: named_values[item.name] for item in changes if named_values[item.name] is not None}
        choice, options, plain = (
            build_options(RecipeChoice, named_values),
            build_options(RunOptions, named_values),
            build_options(PlainOptions, named_values),
        )
        run(choice, merge_paths({}, values), options, plain)
    except (ValueError, OSError) as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"multitf.run: {error}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
