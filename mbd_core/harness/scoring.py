"""An answer with the counts of its decoding, and its score by this project's graders, for the harness's task files."""

from collections.abc import Sequence
from typing import Any, Self

from mbd_core.batch.rows import PROBLEM_COLUMNS
from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.blocks.request import FinishReason
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.kinds.task import Problem, Task


class CountedText(str):
    """A text with its counts and finish reason; `counts` is `None` for a request that was not decoded."""

    counts: Counts | None
    finish_reason: FinishReason | None

    def __new__(cls, text: str, counts: Counts | None = None, finish_reason: FinishReason | None = None) -> Self:
        self = super().__new__(cls, text)
        self.counts, self.finish_reason = counts, finish_reason
        return self

    def __getnewargs__(self) -> tuple[str, Counts | None, FinishReason | None]:  # type: ignore[override]
        """Pickles the counts too: the harness caches answers."""
        return str(self), self.counts, self.finish_reason

    def measures(self) -> dict[str, float]:
        """NFE, tokens, TPF, TPS and `cut` (1: the length limit ended it); empty for a request that was not decoded.

        TPS divides by the seconds of the steps that decoded the request. These also decoded the rest of its batch.
        """
        if self.counts is None:
            return {}
        seconds = self.counts.decode_seconds
        return {
            "nfe": float(self.counts.num_forwards),
            "tokens": float(self.counts.num_tokens),
            "tpf": self.counts.tpf,
            "tps": self.counts.num_tokens / seconds if seconds else 0.0,
            "cut": float(self.finish_reason == "length"),
        }


MEASURES = ("nfe", "tokens", "tpf", "tps", "cut")


def metrics_of(task: Task) -> tuple[str, ...]:
    """The names of the metrics that `score` returns for a task, the accuracy first."""
    return ("accuracy", *task.grader.judgements, *MEASURES)


def score(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The metrics of one answer to a row of `task_files`: right or wrong by each rule of its task, and its counts.

    Answers of other backends have no counts, and the means of the counts leave them out.
    """
    task, text = find_task(doc["task"]), results[0]
    verdict = task.grade(Problem(**{name: doc[name] for name in PROBLEM_COLUMNS}), str(text))
    metrics = {"accuracy": float(verdict.correct)}
    for name in ("strict", "flexible", "base", "plus"):
        right = getattr(verdict, f"{name}_correct")
        if right is not None:
            metrics[name] = float(right)
    return metrics | (text.measures() if isinstance(text, CountedText) else {})
