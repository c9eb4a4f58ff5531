"""Two models on the same problems: how often only one of them is right, and how their tokens per forward differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mbd_core.evaluation.measures.statistics import Interval, mean_interval, sign_test, wins_and_losses
from mbd_core.evaluation.sweep.folder import read_samples


@dataclass(frozen=True)
class GradedAnswer:
    """One graded answer; `num_forwards` is 0 if the answer could not be decoded."""

    correct: bool
    num_tokens: int
    num_forwards: int

    @property
    def tpf(self) -> float:
        """Useful tokens per forward, of an answer that was decoded."""
        return self.num_tokens / self.num_forwards


SharedProblems = Mapping[tuple[Any, ...], GradedAnswer]  # by seed, problem, prompt, and number of a drawn answer


@dataclass(frozen=True, kw_only=True)
class PairedAnswers:
    """Two models on the same problems.

    first_only, second_only  number of problems on which the first, or the second, model has more right answers
    num_decoded              number of answers that both models could decode
    accuracy                 mean difference, first model minus second, in percentage points, over all answers
    tpf, nfe                 the same for useful tokens per forward and for forwards, over the `num_decoded` answers;
                             `None` without such answers
    """

    num_problems: int
    first_only: int
    second_only: int
    num_decoded: int
    accuracy: Interval
    tpf: Interval | None
    nfe: Interval | None

    @property
    def p_value(self) -> float:
        """The p-value of the two-sided sign test."""
        return sign_test(self.first_only, self.second_only)


def load_answers(
    folders: Sequence[Path], *, model: str, task: str, tau_m2t: float, buffer_size: int
) -> SharedProblems:
    """The answers of one model and configuration. Raises `ValueError` if there are none, if they are of several
    configurations or methods, or if two folders have different answers to one problem."""
    answers: dict[tuple[Any, ...], GradedAnswer] = {}
    variants: set[tuple[str, str]] = set()
    for folder in folders:
        for row in read_samples(folder):
            config = json.loads(row["config"])
            setting = (row["model"], row["task"], config.get("tau_m2t"), config.get("buffer_size"))
            if setting == (model, task, tau_m2t, buffer_size):
                answer = GradedAnswer(bool(row["correct"]), row["num_tokens"] or 0, row["num_forwards"] or 0)
                draw = () if row.get("draw") is None else (row["draw"],)
                # a file's lines give its problems their ids: only with its prompt is a problem the same on both sides
                key = (row["seed"], row["problem_id"], row.get("prompt"), *draw)
                if answers.setdefault(key, answer) != answer:
                    raise ValueError(
                        f"{folder} and an earlier folder have different answers of {model} to {row['problem_id']} "
                        f"under seed {row['seed']}; give one sweep of them"
                    )
                variants.add((row["method"], row["config"]))
    if len(variants) > 1:
        names = "; ".join(f"{method} {config}" for method, config in sorted(variants))
        raise ValueError(
            f"{len(variants)} configurations of {model} on {task} have tau_m2t={tau_m2t}, buffer_size={buffer_size}; "
            f"give folders that hold one of them: {names}"
        )
    if not answers:
        raise ValueError(
            f"no samples of {model} on {task} at tau_m2t={tau_m2t}, buffer_size={buffer_size} in "
            f"{', '.join(map(str, folders))}"
        )
    return answers


def pair_answers(first: SharedProblems, second: SharedProblems) -> PairedAnswers:
    """Compare answers problem by problem; `ValueError` if the problems are not the same."""
    if first.keys() != second.keys():
        raise ValueError(
            f"the two sides hold different problems ({len(first)} and {len(second)}); sweep the same seeds and files"
        )
    keys = sorted(first, key=lambda key: key[1])
    right = [(key[1], 100.0 * (first[key].correct - second[key].correct)) for key in keys]
    decoded = [key for key in keys if first[key].num_forwards and second[key].num_forwards]
    first_only, second_only = wins_and_losses(right)
    return PairedAnswers(
        num_problems=len({key[1] for key in keys}),
        first_only=first_only,
        second_only=second_only,
        num_decoded=len(decoded),
        accuracy=_difference(right),
        tpf=_difference([(key[1], first[key].tpf - second[key].tpf) for key in decoded]) if decoded else None,
        nfe=_difference([(key[1], float(first[key].num_forwards - second[key].num_forwards)) for key in decoded])
        if decoded
        else None,
    )


def _difference(differences: Sequence[tuple[str, float]]) -> Interval:
    return mean_interval(np.array([value for _, value in differences]), [problem for problem, _ in differences])
