"""Train a recipe on Ray: `ray job submit --working-dir . -- python jobs/train_multitf.py --recipe tiny-mbd`.

Without a cluster (no RAY_ADDRESS) it starts one for itself. Exit codes: 0 done, 1 the training failed, 2 bad input.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mbd_core.multitf.recipes import RECIPES


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.recipe not in RECIPES:
        return refuse(f"unknown recipe {args.recipe!r}; known: {', '.join(sorted(RECIPES))}")
    if args.steps is not None and args.steps < 1:
        return refuse(f"--steps {args.steps} must be at least 1")

    from actors.training import TrainingRun, begin, fit, shortened  # importing Ray takes seconds: bad input first
    from cluster.local import connect

    recipe = RECIPES[args.recipe]
    if args.base is not None:
        recipe = replace(recipe, base=str(args.base.resolve()))
    if args.steps is not None:
        recipe = shortened(recipe, args.steps)
    name = args.run_name or recipe.name
    storage = args.storage.resolve()
    out = args.out.resolve() if args.out else storage / name / "model"
    try:
        run = TrainingRun(
            recipe=recipe,
            name=name,
            storage=storage,
            out=out,
            num_workers=args.workers,
            checkpoint_every=args.checkpoint_every,
            max_failures=args.max_failures,
        )
        begin(run, resume=args.resume)
        connect(num_cpus=max(4, run.num_workers + 1))
        result = fit(run)
    except ValueError as error:
        return refuse(str(error))
    print(f"model: {result.model}")
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--recipe", required=True, help=f"one of {', '.join(sorted(RECIPES))}")
    p.add_argument("--steps", type=int, help="updates, instead of the recipe's; the schedule shrinks with them")
    p.add_argument("--base", type=Path, metavar="DIR", help="model folder to start from, instead of the recipe's")
    p.add_argument("--workers", type=int, default=2, help="training processes (default: %(default)s)")
    p.add_argument(
        "--storage",
        type=Path,
        default=Path.home() / "mbd-runs",
        metavar="DIR",
        help="where runs keep their checkpoints, reachable by every worker (default: %(default)s)",
    )
    p.add_argument("--run-name", metavar="NAME", help="the run's folder in --storage (default: the recipe's name)")
    p.add_argument("--out", type=Path, metavar="DIR", help="model folder to write (default: STORAGE/RUN_NAME/model)")
    p.add_argument("--resume", action="store_true", help="go on with the run of this name")
    p.add_argument("--checkpoint-every", type=int, default=100, metavar="N", help="steps (default: %(default)s)")
    p.add_argument("--max-failures", type=int, default=3, metavar="N", help="lost workers to survive (default: 3)")
    return p


def refuse(reason: str) -> int:
    print(reason, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
