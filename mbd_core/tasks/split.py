"""Train and test halves of a generated task, told apart by what a problem asks rather than by when it was drawn."""

import hashlib
from typing import Literal

Split = Literal["train", "valid", "test"]


def split_of(key: str) -> Split:
    """The split a problem key belongs to: 1 in 10 keys is test, 1 in 10 is valid (tune on it), the rest is train."""
    bucket = hashlib.sha256(key.encode()).digest()[0] % 10
    return "test" if bucket == 0 else "valid" if bucket == 1 else "train"
