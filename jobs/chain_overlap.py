"""How many gsm-mini test problems have an arithmetic chain that training has seen, and the accuracy without them.

    python jobs/chain_overlap.py out/seed-0 out/seed-1 out/seed-2

A chain is all of an answer's equations in order, whatever the words around them. Reads the samples of sweeps on the
test split, and draws their problems and the training problems of every recipe again.
"""

import argparse
import itertools
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow.parquet as pq

from mbd_core.multitf.recipes import RECIPES
from mbd_core.tasks import gsm_mini

EQUATION = re.compile(r"\d+ [-+*] \d+ = \d+")


def chain(answer: str) -> tuple[str, ...]:
    """The equations of a worked answer."""
    return tuple(EQUATION.findall(answer))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="--out folders of sweeps with gsm-mini")
    folders = parser.parse_args(argv).folders
    trained = {
        chain(row["answer"])
        for data in {recipe.data for recipe in RECIPES.values()}
        for row in itertools.islice(gsm_mini.generate(split="train", seed=data.seed), data.per_task)
    }
    correct: dict[tuple[str, str, float, bool], list[bool]] = defaultdict(list)
    for folder in folders:
        settings = json.loads((folder / "report.json").read_text())["settings"]
        drawn = gsm_mini.generate(split="test", seed=settings["seed"])
        problems = itertools.islice(drawn, settings["tasks"]["gsm-mini"]["n"])
        seen_by_question = {row["question"]: chain(row["answer"]) in trained for row in problems}
        for path in sorted((folder / "samples").glob("*.parquet")):
            for row in pq.read_table(path).to_pylist():
                if row["task"] == "gsm-mini":
                    seen = seen_by_question[row["prompt"]]
                    tau = json.loads(row["config"])["tau_m2t"]
                    correct[row["model"], row["method"], tau, seen].append(row["correct"])
    print("| model | method | tau_m2t | chain | n | Acc (%) |\n|---|---|---|---|---|---|")
    for (model, method, tau, seen), values in sorted(correct.items()):
        name = "in training" if seen else "unseen"
        print(f"| {model} | {method} | {tau} | {name} | {len(values)} | {100 * sum(values) / len(values):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
