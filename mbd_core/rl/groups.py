"""Groups of answers to one prompt: which groups teach something, and the advantage of each answer.

Facts and formulas: LightningRL (decoupled z-scores, the group filter), TraceRL (z-scored rewards, shares of 0.2 to
0.8). A z-score is `(x - mean) / std` over the population, and 0 if all values are equal, but for rounding.

A part of the reward that does not apply to an answer (`None`) leaves the answer out of that part's mean and deviation,
counts as a z-score of 0, and adds nothing to the weighted sum.
"""

import random
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Annotated, Literal

from mbd_core.fields import UPDATES, Flag, Ge, Le, configuration
from mbd_core.rl.parts import CORRECT, TPF

AdvantageRule = Literal["decoupled", "joint", "correct", "shuffled"]
Reason = Literal["undecoded", "unrewarded", "too_few_right", "too_many_right", "even_tpf"]
REASONS: tuple[Reason, ...] = typing.get_args(Reason)
LIGHTNING_RL = 0.01  # the filter of LightningRL: some answer is right, and TPF differs
ROUNDING = 1e-12  # smaller differences, relative to the values, come from arithmetic, and a z-score would enlarge them


@configuration(panel=UPDATES)
class GroupConfig:
    """Which groups are kept, and how rewards become advantages.

    decoupled  each part of the reward is z-scored within the group, and the weighted sum over the batch (LightningRL)
    joint      the weighted sum of the parts is z-scored within the group (TraceRL)
    correct    1 for each right answer; wrong answers are left out (rejection sampling)
    shuffled   decoupled, then permuted within each group: a control that must teach nothing
    """

    advantages: Annotated[AdvantageRule, Flag(metavar="NAME")] = "decoupled"
    """How a group's rewards become advantages."""
    least_right: Annotated[
        float | None, Ge(0), Le(1), Flag(default="0.01 if correct is rewarded, alone or with tpf; else 0")
    ] = None
    """A group is kept if its share of right answers is at least this; 0 keeps groups without a right answer."""
    most_right: Annotated[float, Ge(0), Le(1)] = 1.0
    """A group is kept if its share of right answers is at most this; 1 keeps groups that are all right."""
    least_tpf_range: Annotated[
        float | None, Ge(0), Flag(default="0.01 if tpf is rewarded, alone or with correct; else 0")
    ] = None
    """A group is kept if its TPF differs by at least this; 0 keeps groups of equal TPF."""

    def __post_init__(self) -> None:
        if self.least_right is not None and self.least_right > self.most_right:
            raise ValueError(f"least_right={self.least_right} must be at most most_right={self.most_right}")

    def filled(self, weights: Mapping[str, float]) -> "GroupConfig":
        """Fills in the filters that were not given, by the rewarded parts: only these parts judge a group."""
        is_own = not weights.keys() <= {CORRECT, TPF}  # a part of the user's own teaches by itself
        needs_right = self.advantages == "correct" or (CORRECT in weights and not is_own)
        needs_range = TPF in weights and not is_own
        right, tpf_range = self.least_right, self.least_tpf_range
        if right is None:
            right = min(LIGHTNING_RL, self.most_right) if needs_right else 0.0
        if tpf_range is None:
            tpf_range = LIGHTNING_RL if needs_range else 0.0
        return replace(self, least_right=right, least_tpf_range=tpf_range)


@dataclass(frozen=True, kw_only=True)
class RewardedAnswer:
    """An answer, as a group's filter and its advantages see it.

    rewards  the parts of the reward by name: `None` for a part that does not apply; empty for an answer without reward
    """

    group: int
    correct: bool
    tpf: float
    rewards: Mapping[str, float | None]

    @property
    def is_rewarded(self) -> bool:
        """Whether a part applies."""
        return any(value is not None for value in self.rewards.values())


def drop_reason(answers: Sequence[RewardedAnswer], weights: Mapping[str, float], config: GroupConfig) -> Reason | None:
    """Why a group teaches nothing, `None` if it teaches; a group of one answer has nothing to compare it with."""
    if len(answers) < 2:
        return "undecoded"
    rewarded = [answer for answer in answers if answer.is_rewarded]
    if len(rewarded) < 2:
        return "unrewarded"
    config = config.filled(weights)
    assert config.least_right is not None and config.least_tpf_range is not None
    right = fmean(answer.correct for answer in rewarded)
    if right < config.least_right:
        return "too_few_right"
    if right > config.most_right:
        return "too_many_right"
    tpfs = [answer.tpf for answer in rewarded]
    return "even_tpf" if max(tpfs) - min(tpfs) < config.least_tpf_range else None


def weighted_sum(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """The weighted sum of the parts that apply."""
    return sum(weight * (rewards[name] or 0.0) for name, weight in weights.items())


def advantages(
    answers: Sequence[RewardedAnswer], weights: Mapping[str, float], config: GroupConfig, *, seed: int
) -> tuple[dict[int, float], Counter[Reason]]:
    """The advantage of each answer that teaches, by its place among `answers`, and the numbers of dropped groups by
    reason. `weights` are the weights of the reward's parts; `seed` seeds the shuffling."""
    groups: dict[int, list[int]] = {}
    for place, answer in enumerate(answers):
        groups.setdefault(answer.group, []).append(place)
    dropped: Counter[Reason] = Counter()
    kept: list[list[int]] = []
    for places in groups.values():
        reason = drop_reason([answers[place] for place in places], weights, config)
        if reason is None:
            kept.append([place for place in places if answers[place].is_rewarded])
        else:
            dropped[reason] += 1
    if config.advantages == "correct":
        return {place: 1.0 for places in kept for place in places if answers[place].correct}, dropped
    values: dict[int, float] = {}
    for places in kept:
        if config.advantages == "joint":
            of_group = z_scores([weighted_sum(answers[place].rewards, weights) for place in places])
        else:
            scores = {name: _applying_z_scores([answers[place].rewards[name] for place in places]) for name in weights}
            sums = [sum(weights[name] * scores[name][at] for name in weights) for at in range(len(places))]
            rounding = ROUNDING * sum(map(abs, weights.values()))
            of_group = [value if abs(value) > rounding else 0.0 for value in sums]
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


def _applying_z_scores(values: Sequence[float | None]) -> list[float]:
    """`z_scores` of the values that are not `None`, and 0 for `None`."""
    scores = iter(z_scores([value for value in values if value is not None]))
    return [0.0 if value is None else next(scores) for value in values]


def z_scores(values: Sequence[float]) -> list[float]:
    """Each value's distance from the mean in standard deviations; zeros if all values are equal, but for rounding."""
    if not values or max(values) - min(values) <= ROUNDING * max(map(abs, values)):
        return [0.0] * len(values)
    mean, deviation = fmean(values), pstdev(values)
    scores = [(value - mean) / deviation for value in values]
    return [score if abs(score) > ROUNDING else 0.0 for score in scores]


def num_even(answers: Sequence[RewardedAnswer], values: Mapping[int, float]) -> int:
    """The number of kept groups in which no answer is better than another: all their advantages are 0."""
    largest: dict[int, float] = {}
    for place, value in values.items():
        group = answers[place].group
        largest[group] = max(largest.get(group, 0.0), abs(value))
    return sum(value == 0.0 for value in largest.values())


def why_idle(reasons: Mapping[Reason, int], num_even: int, weights: Mapping[str, float], config: GroupConfig) -> str:
    """Why groups taught nothing, and the remedies, in words; the most frequent reason first."""
    filled, helps = config.filled(weights), "other problems, a larger --group or another part in --rewards helps"
    needs_right = set(weights) == {CORRECT} or config.advantages == "correct"
    keeps_right = helps if needs_right else "--least-right 0 keeps them"
    texts: dict[str, str] = {
        "undecoded": "had fewer than two decoded answers",
        "unrewarded": "had fewer than two answers that got a reward",
        "too_few_right": f"were dropped, since their share of right answers is below {filled.least_right:g} "
        f"({keeps_right})",
        "too_many_right": f"were dropped, since their share of right answers is above {filled.most_right:g} "
        "(--most-right 1 keeps them)",
        "even_tpf": f"were dropped, since their TPF differs by less than {filled.least_tpf_range:g} "
        "(--least-tpf-range 0 keeps them)",
        "even_rewards": f"had the same {' and '.join(weights)} in all answers ({helps})",
    }
    counts = {str(name): number for name, number in reasons.items()} | {"even_rewards": num_even}
    named = sorted((name for name in texts if counts.get(name)), key=lambda name: -counts[name])
    return ", ".join(f"{counts[name]} {texts[name]}" for name in named) or f"had no right answer ({helps})"
