"""A sweep cut into parts: tables that are decoded, graded and written whole, or not at all.

How a sweep is cut follows from its plan and from the size of a part alone, and an engine decodes a part from an empty
state. So a part has the same rows and the same numbers whenever, wherever and after whatever interruption it is made.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from mbd_core.evaluation.sample_tables import PLANNED_COLUMNS

Row = Mapping[str, Any]
AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class Part:
    """Some rows of a sweep's plan (`PLANNED_COLUMNS`), of one model, with all configurations of each problem."""

    number: int
    rows: Sequence[Row]

    @property
    def model(self) -> str:
        return str(self.rows[0]["model"])

    def table(self) -> pa.Table:
        return pa.Table.from_pylist([dict(row) for row in self.rows], schema=PLANNED_COLUMNS)


@dataclass(frozen=True)
class Shard:
    """The part of a sweep that one of several jobs computes: every `count`-th part, from the `index`-th, from 1."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """`i/n`; `ValueError` for anything else."""
        first, slash, second = text.partition("/")
        if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
            raise ValueError(f"--shard {text} must be i/n, the i-th of n shards, i from 1 to n")
        return cls(int(first), int(second))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, number: int) -> bool:
        """Whether the part with this number is of this shard."""
        return number % self.count == self.index - 1


def part_size(num_rows: int, *, max_rows: int) -> int:
    """The rows of a part: four batches of `max_rows`, fewer in a small sweep, so that it too has parts for several
    engines, but at least one. It depends on nothing but the plan, so that all shards are cut alike."""
    return max(max_rows, min(4 * max_rows, -(-num_rows // 16)))


def cut(rows: Iterable[Row], *, rows_per_part: int) -> list[Part]:
    """The parts, in the order in which they are best decoded: of each model the longest prompts first.

    A part has at most `rows_per_part` rows, or the rows of one problem. Long prompts first, so that what is left at
    the end, when engines run out of parts, is short.
    """
    problems: dict[str, dict[tuple[str, str], list[Row]]] = {}
    for row in rows:
        problems.setdefault(row["model"], {}).setdefault((row["task"], row["problem_id"]), []).append(row)
    parts: list[list[Row]] = []
    for of_model in problems.values():
        current: list[Row] = []
        for group in sorted(of_model.values(), key=lambda group: -len(group[0]["prompt"])):
            if current and len(current) + len(group) > rows_per_part:
                parts.append(current)
                current = []
            current = [*current, *group]
        parts.append(current)
    return [Part(number, part) for number, part in enumerate(parts)]


def in_turns(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """The rows in the order in which they share prefixes best: the first of each prompt, then the second of each.

    Requests that begin in one forward find nothing of each other in the cache; those that begin later do.
    """
    turns: Counter[str] = Counter()
    places = []
    for row in rows:
        places.append(turns[row["input"]])
        turns[row["input"]] += 1
    return [row for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0])]
