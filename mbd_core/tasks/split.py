"""Train and test halves of a generated task, told apart by what a problem asks rather than by when it was drawn."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Literal

Split = Literal["train", "valid", "test"]


def split_of(key: str) -> Split:
    """The split a problem key belongs to: 1 in 10 keys is test, 1 in 10 is valid (tune on it), the rest is train."""
    bucket = hashlib.sha256(key.encode()).digest()[0] % 10
    return "test" if bucket == 0 else "valid" if bucket == 1 else "train"


def distinct(draw: Callable[[], tuple[str, dict[str, str]]], split: Split) -> Iterator[tuple[int, dict[str, str]]]:
    """Number the rows of one split that `draw` gives, each key once; ends when 10,000 draws bring nothing new."""
    seen: set[str] = set()
    misses = 0
    while misses < 10_000:
        key, row = draw()
        if key in seen or split_of(key) != split:
            misses += 1
            continue
        misses = 0
        yield len(seen), row
        seen.add(key)
