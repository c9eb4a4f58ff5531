"""The statistics of the reports: a mean with its error or interval, a share with its interval, and the sign test."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

Z_95 = 1.959963984540054  # of the normal distribution, two-sided
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of 1 to 9 degrees of freedom, two-sided."""


def mean(values: Sequence[float]) -> float:
    """The mean, 0 without values."""
    return sum(values) / len(values) if values else 0.0


def spread_of_mean(distances: Sequence[float]) -> float:
    """How far the bound of a mean of independent numbers lies from it, given how far their bounds lie from them."""
    return math.sqrt(sum(distance**2 for distance in distances)) / len(distances)


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error (from the sample variance), which is 0 for fewer than two values."""
    center = mean(values)
    if len(values) < 2:
        return center, 0.0
    variance = sum((value - center) ** 2 for value in values) / (len(values) - 1)
    return center, math.sqrt(variance / len(values))


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of values by Student's t; of more than ten a little wide.

    Raises `ValueError` for fewer than two: they say nothing of their spread.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} values have no interval of Student's; give at least two")
    center, error = mean_and_stderr(values)
    half = STUDENT_95[min(len(values) - 1, len(STUDENT_95)) - 1] * error
    return center - half, center + half


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927), from 0 to 1. Unlike share ± error it never leaves that range,
    and it has a width also where all of few trials, or none, succeed."""
    if n == 0:
        return 0.0, 1.0
    share, spread = successes / n, Z_95**2 / n
    center = (share + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    low = 0.0 if successes == 0 else center - half
    return low, 1.0 if successes == n else center + half


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of `wins` against `losses` under a fair coin."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
    return min(1.0, 2 * tail)


def mean_and_interval(
    values_N: np.ndarray, problems: Sequence[str], *, num_draws: int = 2000, seed: int = 0
) -> tuple[float, tuple[float, float] | None]:
    """The mean of values, at least one, and its 95 % percentile interval over `num_draws` resamples of their problems.

    All values of a drawn problem count together: answers of one problem under several seeds are not independent. Of
    paired differences this is the paired bootstrap. One problem has no interval.
    """
    _, problem_N = np.unique(np.asarray(problems), return_inverse=True)
    sums_P, counts_P = np.bincount(problem_N, weights=values_N), np.bincount(problem_N)
    if len(sums_P) < 2:
        return float(values_N.mean()), None
    rng = np.random.default_rng(seed)
    draws = (rng.integers(len(sums_P), size=len(sums_P)) for _ in range(num_draws))
    low, high = np.percentile([sums_P[drawn].sum() / counts_P[drawn].sum() for drawn in draws], [2.5, 97.5])
    return float(values_N.mean()), (float(low), float(high))


def wins_and_losses(differences: Iterable[tuple[str, float]]) -> tuple[int, int]:
    """Of differences by problem, on how many problems their sum is above 0, and on how many below: the counts of a
    sign test, for which the values of one problem are one."""
    sums: dict[str, float] = {}
    for problem, difference in differences:
        sums[problem] = sums.get(problem, 0.0) + difference
    return sum(total > 0 for total in sums.values()), sum(total < 0 for total in sums.values())


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile; `None` where too few values lie beyond it for it to differ from the largest."""
    if not values or (percent > 50 and len(values) * (100 - percent) < 100):
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
