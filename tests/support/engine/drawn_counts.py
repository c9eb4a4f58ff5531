"""Counts of drawn outcomes, compared."""

from collections import Counter
from typing import Any

MANY_ROWS = {"max_rows": 128, "num_pages": 800, "max_prefill_tokens": 1024}
"""The sizes of an engine that draws many short answers in few steps."""


def chi_square(first: Counter[Any], second: Counter[Any]) -> float:
    """The statistic of the two counts of the same number of draws."""
    return sum((first[x] - second[x]) ** 2 / (first[x] + second[x]) for x in first | second)
