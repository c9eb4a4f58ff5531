"""The statistics of the reports: a number with its 95 % interval, the bootstrap, and exact tests of paired answers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959963984540054  # of the normal distribution, two-sided
NUM_DRAWS = 2000
ENTRIES = 4_000_000  # numbers of one block of draws


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with its 95 % interval. The bounds are `None` if the data are too few for an interval."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of_draws(cls, value: float, values_D: np.ndarray, *, digits: int | None = None) -> "Interval":
        """The percentiles of a bootstrap's draws; a draw without the number, which is NaN, is left out."""
        numbers_D = values_D[~np.isnan(values_D)]
        if not len(numbers_D):
            return cls(value=float(value))
        bounds = np.percentile(numbers_D, [2.5, 97.5])
        low, high = bounds if digits is None else bounds.round(digits)
        return cls(value=float(value), low=float(low), high=float(high))

    @classmethod
    def of_weightings(cls, values_W: np.ndarray) -> "Interval":
        """The interval of values: the first is measured on the data, the others on draws."""
        return cls.of_draws(values_W[0], values_W[1:])

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of a number that has an interval."""
        assert self.low is not None and self.high is not None
        return self.low, self.high

    def is_above(self, bound: float = 0.0) -> bool:
        return self.low is not None and self.low > bound

    def is_below(self, bound: float = 0.0) -> bool:
        return self.high is not None and self.high < bound

    def text(self, form: str = ".2f", bounds: str = "") -> str:
        """The number and its bounds in the format `form`; `bounds` is another format for the bounds."""
        if self.low is None or self.high is None:
            return f"{self.value:{form}}"
        return f"{self.value:{form}} [{self.low:{bounds or form}}, {self.high:{bounds or form}}]"


def bootstrap(groups_P: np.ndarray, *, seed: int | Sequence[int], num_draws: int = NUM_DRAWS) -> Iterator[np.ndarray]:
    """How often each problem counts in each draw (D, P), in blocks of draws.

    `groups_P` numbers the group of each problem, from 0. A draw takes as many groups as there are, with replacement,
    and from each drawn group as many problems as it has, with replacement. With one group this is the plain bootstrap.
    Numbers that are measured on the same draws are paired by problem and by group.
    """
    generator = np.random.default_rng(seed)
    places = [np.flatnonzero(groups_P == number) for number in range(groups_P.max() + 1)]
    block = max(1, ENTRIES // len(groups_P))
    for first in range(0, num_draws, block):
        counts_DP = np.zeros((min(block, num_draws - first), len(groups_P)))
        for counts_P in counts_DP:
            for number in generator.integers(len(places), size=len(places)):
                place = places[number]
                choice = generator.integers(len(place), size=len(place))
                counts_P[place] += np.bincount(choice, minlength=len(place))
        yield counts_DP


def mean_interval(
    values_N: np.ndarray, problems: Sequence[str], *, num_draws: int = NUM_DRAWS, seed: int = 0
) -> Interval:
    """The mean of values, at least one, and its interval over resamples of their problems.

    All values of a drawn problem count together: answers of one problem under several seeds are not independent. Of
    paired differences this is the paired bootstrap. One problem has no interval.
    """
    _, problem_N = np.unique(np.asarray(problems), return_inverse=True)
    sums_PC = np.stack([np.bincount(problem_N, weights=values_N), np.bincount(problem_N)], axis=1)
    if len(sums_PC) < 2:
        return Interval(value=float(values_N.mean()))
    blocks = bootstrap(np.zeros(len(sums_PC), dtype=int), num_draws=num_draws, seed=seed)
    sums_DC = np.concatenate([counts_DP @ sums_PC for counts_DP in blocks])
    return Interval.of_draws(values_N.mean(), sums_DC[:, 0] / sums_DC[:, 1])


def mean(values: Sequence[float]) -> float:
    """The mean, 0 without values."""
    return sum(values) / len(values) if values else 0.0


def mean_and_stderr(values: Sequence[float], problems: Sequence[str] = ()) -> tuple[float, float]:
    """The mean and its standard error (from the sample variance), which is 0 for fewer than two values.

    The values of one of `problems` are not independent, so the error is of the problems' sums; a single problem has
    the error of its values.
    """
    center = mean(values)
    if len(values) < 2:
        return center, 0.0
    num_problems = len(set(problems))
    if num_problems < 2 or num_problems == len(values):
        variance = sum((value - center) ** 2 for value in values) / (len(values) - 1)
        return center, math.sqrt(variance / len(values))
    sums = dict.fromkeys(problems, 0.0)
    for problem, value in zip(problems, values, strict=True):
        sums[problem] += value - center
    variance = sum(total**2 for total in sums.values()) / (num_problems - 1)
    return center, math.sqrt(variance * num_problems) / len(values)


def spread_of_mean(distances: Sequence[float]) -> float:
    """The distance from the mean of independent numbers to its bound, given each number's distance to its own
    bound."""
    return math.sqrt(sum(distance**2 for distance in distances)) / len(distances)


def student_interval(values: Sequence[float]) -> Interval | None:
    """The mean of values with its interval by Student's t; `None` for fewer than two, which say nothing of their
    spread."""
    from scipy.stats import t  # commands load this module for their --help

    if len(values) < 2:
        return None
    center, error = mean_and_stderr(values)
    half = float(t.ppf(0.975, len(values) - 1)) * error
    return Interval(value=center, low=center - half, high=center + half)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927), from 0 to 1. Unlike share ± error it never leaves that range,
    and it has a width even if all of a few trials succeed, or none."""
    from scipy.stats import binomtest

    if n == 0:
        return 0.0, 1.0
    low, high = binomtest(successes, n).proportion_ci(method="wilson")
    return float(low), float(high)


def percent_right(flags: Sequence[bool | None]) -> Interval:
    """The percentage of answers, one or more, that are right, with its Wilson interval."""
    num_right = sum(bool(flag) for flag in flags)
    low, high = wilson_interval(num_right, len(flags))
    return Interval(value=100 * num_right / len(flags), low=100 * low, high=100 * high)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of `wins` against `losses` under a fair coin; 1 without either."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def p_text(p_value: float, *, equals: str = "") -> str:
    """A p-value as reports print it; `equals` stands before a number that is not too small to be printed."""
    return "< 0.001" if p_value < 0.001 else f"{equals}{p_value:.3f}"


def wins_and_losses(differences: Iterable[tuple[str, float]]) -> tuple[int, int]:
    """The numbers of problems whose differences sum to above 0, and to below 0: the counts of a sign test, in which
    the values of a problem count as one."""
    sums: dict[str, float] = {}
    for problem, difference in differences:
        sums[problem] = sums.get(problem, 0.0) + difference
    return sum(total > 0 for total in sums.values()), sum(total < 0 for total in sums.values())


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile; `None` if so few values lie beyond it that it is the largest."""
    if not values or (percent > 50 and len(values) * (100 - percent) < 100):
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
