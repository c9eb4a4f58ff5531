"""Counts of drawn outcomes, compared."""

from collections import Counter
from typing import Any


def chi_square(first: Counter[Any], second: Counter[Any]) -> float:
    """The statistic of the two counts of the same number of draws."""
    return sum((first[x] - second[x]) ** 2 / (first[x] + second[x]) for x in first | second)
