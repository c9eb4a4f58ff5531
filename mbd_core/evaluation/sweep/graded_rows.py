"""The columns of a sweep's samples after grading."""

from collections.abc import Sequence

import pyarrow as pa

from mbd_core.batch.rows import DECODED_COLUMNS, DRAWN_COLUMNS, Row

ISOLATION = b"mbd-isolation"  # of a graded part's metadata: how its programs were contained, where any ran

GRADED_COLUMNS = pa.schema(
    [*DECODED_COLUMNS, pa.field("correct", pa.bool_())]
    + [pa.field(name, pa.string()) for name in ("reason", "detail", "strict", "flexible")]
    + [pa.field(f"{name}_correct", pa.bool_()) for name in ("strict", "flexible", "base", "plus")]
)

VOTE = pa.field("vote", pa.string())
"""Of a sweep that draws tokens: the answer that stands for all that the grader takes as equal to it."""


def graded_schema(rows: Sequence[Row]) -> pa.Schema:
    """The schema of graded rows, which have further columns where the sweep draws tokens."""
    is_drawn = bool(rows) and "draw" in rows[0]
    return pa.schema([*GRADED_COLUMNS, *DRAWN_COLUMNS, VOTE]) if is_drawn else GRADED_COLUMNS
