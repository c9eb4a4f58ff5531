"""Two models on the same problems: how often only one of them is right, and how their tokens per forward differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mbd_core.evaluation.statistics import mean_and_interval, sign_test
from mbd_core.evaluation.sweep_folder import read_samples


@dataclass(frozen=True)
class Answer:
    """One graded answer; `num_forwards` is 0 for one that could not be decoded."""

    correct: bool
    num_tokens: int
    num_forwards: int


Answers = Mapping[tuple[int, str], Answer]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The mean of a measure's differences, first model minus second, with its 95 % interval over the problems."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class PairedAnswers:
    """Two models on the same problems.

    first_only, second_only  problems on which only the first model, or only the second, is right
    num_decoded              problems that both could decode, over which the differences are taken
    accuracy                 in percentage points, over all problems
    tpf, nfe                 useful tokens per forward, and forwards, a sample; `None` without a decoded problem
    """

    num_problems: int
    first_only: int
    second_only: int
    num_decoded: int
    accuracy: Difference
    tpf: Difference | None
    nfe: Difference | None

    @property
    def p_value(self) -> float:
        """The p-value of the two-sided sign test."""
        return sign_test(self.first_only, self.second_only)


def load_answers(folders: Sequence[Path], *, model: str, task: str, tau_m2t: float, buffer_size: int) -> Answers:
    """The answers by (seed, problem), for one model and configuration; `ValueError` if none exists."""
    answers: dict[tuple[int, str], Answer] = {}
    for folder in folders:
        for row in read_samples(folder):
            config = json.loads(row["config"])
            setting = (row["model"], row["task"], config.get("tau_m2t"), config.get("buffer_size"))
            if setting == (model, task, tau_m2t, buffer_size):
                answer = Answer(bool(row["correct"]), row["num_tokens"] or 0, row["num_forwards"] or 0)
                answers[row["seed"], row["problem_id"]] = answer
    if not answers:
        raise ValueError(
            f"no samples of {model} on {task} at tau_m2t={tau_m2t}, buffer_size={buffer_size} in "
            f"{', '.join(map(str, folders))}"
        )
    return answers


def pair_answers(first: Answers, second: Answers) -> PairedAnswers:
    """Compare answers problem by problem; `ValueError` if the problems are not the same."""
    if first.keys() != second.keys():
        raise ValueError(
            f"the two sides hold different problems ({len(first)} and {len(second)}); sweep the same seeds"
        )
    pairs = [(first[key], second[key]) for key in sorted(first)]
    decoded = [(a, b) for a, b in pairs if a.num_forwards and b.num_forwards]
    return PairedAnswers(
        num_problems=len(pairs),
        first_only=sum(a.correct and not b.correct for a, b in pairs),
        second_only=sum(b.correct and not a.correct for a, b in pairs),
        num_decoded=len(decoded),
        accuracy=_difference([100.0 * (a.correct - b.correct) for a, b in pairs]),
        tpf=_difference([a.num_tokens / a.num_forwards - b.num_tokens / b.num_forwards for a, b in decoded])
        if decoded
        else None,
        nfe=_difference([float(a.num_forwards - b.num_forwards) for a, b in decoded]) if decoded else None,
    )


def _difference(differences: Sequence[float]) -> Difference:
    mean, low, high = mean_and_interval(np.asarray(differences))
    return Difference(mean=mean, low=low, high=high)
