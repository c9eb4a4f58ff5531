"""Groups of answers to one prompt: which of them teach something, and the advantage of each answer.

Facts and formulas: LightningRL (decoupled z-scores, the group filter), TraceRL (z-scored rewards, shares of 0.2 to
0.8). A z-score is `(x - mean) / std` over the population, and 0 where all are equal.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Annotated, Literal

from mbd_core.options import UPDATES, Option, check

AdvantageRule = Literal["decoupled", "joint", "correct", "shuffled"]
Reason = Literal["undecoded", "too_few_right", "too_many_right", "even_tpf"]
REASONS: tuple[Reason, ...] = ("undecoded", "too_few_right", "too_many_right", "even_tpf")


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Which groups are kept, and how rewards become advantages.

    decoupled  each part of the reward is z-scored within the group alone, the weighted sum over the batch
               (LightningRL)
    joint      the weighted sum of the parts is z-scored within the group (TraceRL)
    correct    1 for each right answer; wrong ones are left out (rejection sampling)
    shuffled   decoupled, then permuted within each group: a control that must teach nothing
    """

    advantages: Annotated[
        AdvantageRule, Option("How a group's rewards become advantages.", UPDATES, metavar="NAME")
    ] = "decoupled"
    least_right: Annotated[
        float,
        Option(
            "Groups are kept whose share of right answers is at least this; 0 keeps those that are all wrong.",
            UPDATES,
            at_least=0,
            at_most=1,
        ),
    ] = 0.01
    most_right: Annotated[
        float, Option("And at most this; 1 keeps groups that are all right.", UPDATES, at_least=0, at_most=1)
    ] = 1.0
    least_tpf_range: Annotated[
        float,
        Option("Groups are kept whose TPF differs by at least this.", UPDATES, at_least=0),
    ] = 0.01

    def __post_init__(self) -> None:
        check(self)
        if self.least_right > self.most_right:
            raise ValueError(f"least_right={self.least_right} must be at most most_right={self.most_right}")


@dataclass(frozen=True, kw_only=True)
class ScoredAnswer:
    """What a group's filter and its advantages look at; `rewards` are the parts of the reward by name."""

    group: int
    correct: bool
    tpf: float
    rewards: Mapping[str, float]


def drop_reason(answers: Sequence[ScoredAnswer], config: GroupConfig) -> Reason | None:
    """Why a group teaches nothing, `None` where it does; a group of one answer has nothing to compare it with."""
    if len(answers) < 2:
        return "undecoded"
    right = fmean(answer.correct for answer in answers)
    if right < config.least_right:
        return "too_few_right"
    if right > config.most_right:
        return "too_many_right"
    tpfs = [answer.tpf for answer in answers]
    return "even_tpf" if max(tpfs) - min(tpfs) < config.least_tpf_range else None


def advantages(
    answers: Sequence[ScoredAnswer], weights: Mapping[str, float], config: GroupConfig, *, seed: int
) -> tuple[dict[int, float], Counter[Reason]]:
    """The advantage of each answer that teaches, by its place among `answers`, and how many groups were dropped, by
    reason. `weights` are those of the parts of the reward; `seed` is of the shuffling."""
    groups: dict[int, list[int]] = {}
    for place, answer in enumerate(answers):
        groups.setdefault(answer.group, []).append(place)
    dropped: Counter[Reason] = Counter()
    kept: list[list[int]] = []
    for places in groups.values():
        reason = drop_reason([answers[place] for place in places], config)
        if reason is None:
            kept.append(places)
        else:
            dropped[reason] += 1
    if config.advantages == "correct":
        return {place: 1.0 for places in kept for place in places if answers[place].correct}, dropped
    values: dict[int, float] = {}
    for places in kept:
        parts = {name: [answers[place].rewards[name] for place in places] for name in weights}
        if config.advantages == "joint":
            sums = [sum(weights[name] * parts[name][at] for name in weights) for at in range(len(places))]
            of_group = z_scores(sums)
        else:
            scores = {name: z_scores(parts[name]) for name in weights}
            of_group = [sum(weights[name] * scores[name][at] for name in weights) for at in range(len(places))]
        values |= dict(zip(places, of_group, strict=True))
    if config.advantages != "joint":
        values = dict(zip(values, z_scores(list(values.values())), strict=True))
    if config.advantages == "shuffled":
        draws = random.Random(f"advantages/{seed}")
        for places in kept:
            of_group = [values[place] for place in places]
            draws.shuffle(of_group)
            values |= dict(zip(places, of_group, strict=True))
    return values, dropped


def z_scores(values: Sequence[float]) -> list[float]:
    """Each value's distance from the mean in standard deviations; zeros where all are equal."""
    if not values or max(values) == min(values):
        return [0.0] * len(values)
    mean, deviation = fmean(values), pstdev(values)
    return [(value - mean) / deviation for value in values]
