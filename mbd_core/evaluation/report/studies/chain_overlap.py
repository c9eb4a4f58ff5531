"""gsm-mini test problems whose arithmetic chain occurs in training, and the accuracy with and without them.

A chain is the sequence of an answer's equations, without the words around them.
"""

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from mbd_core.evaluation.report.metrics import ACCURACY
from mbd_core.evaluation.sweep.folder import read_report, read_samples
from mbd_core.tables import Table
from mbd_core.tasks import gsm_mini

Chain = tuple[str, ...]

EQUATION = re.compile(r"\d+ [-+*] \d+ = \d+")


def chain(answer: str) -> Chain:
    """The equations of a worked answer."""
    return tuple(EQUATION.findall(answer))


def training_chains(streams: Collection[tuple[int, int]]) -> set[Chain]:
    """The chains of all training problems, which are generated again: `streams` are (seed, number of problems)."""
    return {
        chain(row["answer"])
        for seed, num_problems in streams
        for row in itertools.islice(gsm_mini.generate(split="train", seed=seed), num_problems)
    }


def overlap_table(folders: Sequence[Path], training: Collection[Chain]) -> Table:
    """Accuracy by model, method, threshold and whether the chain is in `training`.

    `folders` are sweeps on gsm-mini's test split, whose problems are generated again; a folder that is named twice
    counts once.
    """
    correct: dict[tuple[str, str, float, bool], list[bool]] = defaultdict(list)
    for folder in dict.fromkeys(path.resolve() for path in folders):
        settings = read_report(folder)["settings"]
        problems = itertools.islice(
            gsm_mini.generate(split="test", seed=settings["seed"]), settings["tasks"]["gsm-mini"]["n"]
        )
        is_known = {row["question"]: chain(row["answer"]) in training for row in problems}
        for row in read_samples(folder):
            if row["task"] == "gsm-mini":
                tau_m2t = json.loads(row["config"])["tau_m2t"]
                correct[row["model"], row["method"], tau_m2t, is_known[row["prompt"]]].append(row["correct"])
    return Table(
        columns=("model", "method", "tau_m2t", "chain", "n", ACCURACY.head),
        rows=[
            (
                *(model, method, tau_m2t, "in training" if is_known else "unseen", len(values)),
                f"{100 * sum(values) / len(values):.2f}",
            )
            for (model, method, tau_m2t, is_known), values in sorted(correct.items())
        ],
    )
