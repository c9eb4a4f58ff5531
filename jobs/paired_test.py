"""Two models on the same problems: how often only one of them is right, and the sign test on that.

    python jobs/paired_test.py --first tiny-mbd out/seed-0 --second tiny-tf out/tf-0 \\
        --task gsm-mini --tau 0.9 --buffer 4

Each side is a model's name and the --out folders of sweeps that hold it; the folders are matched by seed and problem.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import pyarrow.parquet as pq

Answers = dict[tuple[int, str], bool]


def load_answers(side: list[str], *, task: str, tau: float, buffer: int) -> Answers:
    """Whether each (seed, problem) was right for one model and one configuration."""
    model, *folders = side
    answers: Answers = {}
    for folder in folders:
        for path in sorted(Path(folder, "samples").glob("*.parquet")):
            for row in pq.read_table(path).to_pylist():
                config = json.loads(row["config"])
                setting = (row["model"], row["task"], config["tau_m2t"], config["buffer_size"])
                if setting == (model, task, tau, buffer):
                    answers[row["seed"], row["problem_id"]] = row["correct"]
    if not answers:
        raise ValueError(f"no samples of {model} on {task} at tau_m2t={tau}, buffer_size={buffer} in {folders}")
    return answers


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of `wins` against `losses` under a fair coin."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
    return min(1.0, 2 * tail)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--first", "--second"):
        parser.add_argument(name, nargs="+", required=True, metavar="MODEL DIR", help="a model and its sweeps")
    parser.add_argument("--task", required=True)
    parser.add_argument("--tau", type=float, required=True, help="tau_m2t")
    parser.add_argument("--buffer", type=int, required=True, help="buffer_size")
    args = parser.parse_args(argv)
    try:
        first, second = (
            load_answers(side, task=args.task, tau=args.tau, buffer=args.buffer) for side in (args.first, args.second)
        )
    except ValueError as error:
        parser.error(str(error))
    if first.keys() != second.keys():
        parser.error(f"the two sides hold different problems ({len(first)} and {len(second)}); sweep the same seeds")
    wins = sum(first[k] and not second[k] for k in first)
    losses = sum(second[k] and not first[k] for k in first)
    print(f"{len(first)} problems; only {args.first[0]} right: {wins}, only {args.second[0]} right: {losses}")
    print(f"sign test, two-sided: p = {sign_test(wins, losses):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
