"""Two models on the same problems: how often only one of them is right."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mbd_core.evaluation.statistics import sign_test
from mbd_core.evaluation.sweep_folder import read_samples

Answers = dict[tuple[int, str], bool]


@dataclass(frozen=True, kw_only=True)
class PairedAnswers:
    """The number of problems on which only the first model, or only the second, is right."""

    num_problems: int
    first_only: int
    second_only: int

    @property
    def p_value(self) -> float:
        """The p-value of the two-sided sign test."""
        return sign_test(self.first_only, self.second_only)


def load_answers(folders: Sequence[Path], *, model: str, task: str, tau_m2t: float, buffer_size: int) -> Answers:
    """Whether an answer is right, by (seed, problem), for one model and configuration; `ValueError` if none exists."""
    answers: Answers = {}
    for folder in folders:
        for row in read_samples(folder):
            config = json.loads(row["config"])
            setting = (row["model"], row["task"], config.get("tau_m2t"), config.get("buffer_size"))
            if setting == (model, task, tau_m2t, buffer_size):
                answers[row["seed"], row["problem_id"]] = row["correct"]
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
    return PairedAnswers(
        num_problems=len(first),
        first_only=sum(first[key] and not second[key] for key in first),
        second_only=sum(second[key] and not first[key] for key in first),
    )
