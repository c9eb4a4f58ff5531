"""The statistics of the reports: a mean with its standard error, and the sign test."""

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """The mean, 0 without values."""
    return sum(values) / len(values) if values else 0.0


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error (from the sample variance), which is 0 for fewer than two values."""
    center = mean(values)
    if len(values) < 2:
        return center, 0.0
    variance = sum((value - center) ** 2 for value in values) / (len(values) - 1)
    return center, math.sqrt(variance / len(values))


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of `wins` against `losses` under a fair coin."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
    return min(1.0, 2 * tail)
