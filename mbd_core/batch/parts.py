"""A batch cut into parts, each of which is decoded and written completely or not at all.

The cut depends only on the plan and the size of a part, and an engine decodes each part from an empty state. So a
part's rows and numbers depend neither on time and machine nor on interruptions.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from mbd_core.batch.rows import PLANNED_COLUMNS, PlannedRow, with_draws

NumberedTable = tuple[int, pa.Table]
"""The number of a part, and its table."""

AnyRow = TypeVar("AnyRow", bound=PlannedRow)


@dataclass(frozen=True)
class Part:
    """Some rows of a sweep's plan (`PLANNED_COLUMNS`), of one model, with all configurations of each problem."""

    number: int
    rows: Sequence[PlannedRow]

    @property
    def model(self) -> str:
        return str(self.rows[0]["model"])

    def table(self) -> pa.Table:
        return pa.Table.from_pylist([dict(row) for row in self.rows], schema=with_draws(PLANNED_COLUMNS, self.rows))


def part_size(num_rows: int, *, max_rows: int) -> int:
    """The number of rows of a part: four batches of `max_rows`. In a small sweep a part has fewer rows, at least one
    batch, so that several engines get parts. The number depends only on the plan, so that all shards are cut alike."""
    return max(max_rows, min(4 * max_rows, -(-num_rows // 16)))


def cut(rows: Iterable[PlannedRow], *, rows_per_part: int) -> list[Part]:
    """The parts in the order of decoding: each model's longest prompts first.

    A part has at most `rows_per_part` rows, or the rows of one problem. Long prompts come first, so that the last
    parts are short and the engines end at about the same time.
    """
    problems: dict[str, dict[tuple[str, str], list[PlannedRow]]] = {}
    for row in rows:
        problems.setdefault(row["model"], {}).setdefault((row["task"], row["problem_id"]), []).append(row)
    parts: list[list[PlannedRow]] = []
    for of_model in problems.values():
        current: list[PlannedRow] = []
        for group in sorted(of_model.values(), key=lambda group: -len(group[0]["prompt"])):
            if current and len(current) + len(group) > rows_per_part:
                parts.append(current)
                current = []
            current = [*current, *group]
        parts.append(current)
    return [Part(number, part) for number, part in enumerate(parts)]


def in_turns(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """The rows in an order in which they share prefixes: the first row of every prompt, then the second row of every
    prompt.

    Requests that begin in the same forward cannot share a prefix; later requests find it in the cache.
    """
    turns: Counter[str] = Counter()
    places = []
    for row in rows:
        places.append(turns[row["input"]])
        turns[row["input"]] += 1
    return [row for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0])]
