"""Train, valid and test splits of a generated task: a hash of the problem's key decides, not the order of drawing."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

Split = Literal["train", "valid", "test"]


def split_of(key: str) -> Split:
    """The split a problem key belongs to: 1 in 10 keys is test, 1 in 10 is valid (tune on it), the rest is train."""
    bucket = hashlib.sha256(key.encode()).digest()[0] % 10
    return "test" if bucket == 0 else "valid" if bucket == 1 else "train"


P = TypeVar("P")


def distinct(draw: Callable[[], tuple[str, P]], split: Split) -> Iterator[tuple[int, str, P]]:
    """(number, key, problem) of the draws that belong to one split; every key occurs once.

    The stream ends after 10,000 draws in a row without a new problem.
    """
    keys: set[str] = set()
    misses = 0
    while misses < 10_000:
        key, problem = draw()
        if key in keys or split_of(key) != split:
            misses += 1
            continue
        misses = 0
        yield len(keys), key, problem
        keys.add(key)
