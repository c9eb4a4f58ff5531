"""The score of one sample in lm-evaluation-harness, by this project's graders: what our task files name."""

from collections.abc import Sequence
from typing import Any

from mbd_core.evaluation.graders import grade
from mbd_core.evaluation.sample_tables import PROBLEM_COLUMNS
from mbd_core.evaluation.tasks import Problem, Task, find_task
from mbd_core.harness.counted_text import CountedText

MEASURES = ("nfe", "tokens", "tpf", "tps", "cut")


def metrics_of(task: Task) -> tuple[str, ...]:
    """The names of what `score` returns for a task, the accuracy first."""
    kinds = {"code": (), "plus": ("base", "plus")}.get(task.rule, ("strict", "flexible"))
    return ("accuracy", *kinds, *MEASURES)


def score(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The metrics of one answer to a row of `task_files`: right or wrong, by every rule of its task, and its counts.

    An answer of another backend has no counts, and adds nothing to their means.
    """
    task, text = find_task(doc["task"]), results[0]
    found = grade(task, Problem(**{name: doc[name] for name in PROBLEM_COLUMNS}), str(text))
    metrics = {"accuracy": float(found.correct)}
    for name in ("strict", "flexible", "base", "plus"):
        right = getattr(found, f"{name}_correct")
        if right is not None:
            metrics[name] = float(right)
    return metrics | (text.measures() if isinstance(text, CountedText) else {})
