"""The rows of a sweep after grading: their types, and Arrow's columns."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import pyarrow as pa

from mbd_core.batch.rows import DECODED_COLUMNS, DecodedRow, arrow_fields, with_draws

ISOLATION = b"mbd-isolation"  # this key of a graded part's metadata says how its programs, if any, were contained


class GradeColumns(TypedDict, total=False):
    """The grade (`Grade`); `correct` is false for a sample that was not decoded."""

    correct: bool
    reason: str | None
    detail: str | None
    strict: str | None
    flexible: str | None
    strict_correct: bool | None
    flexible_correct: bool | None
    base_correct: bool | None
    plus_correct: bool | None


class VoteColumns(TypedDict, total=False):
    """The column of sweeps that draw tokens: one answer for all answers that the grader takes as equal."""

    vote: str | None


class GradedRow(DecodedRow, GradeColumns, VoteColumns):
    """A graded sample."""


GRADED_COLUMNS = pa.schema([*DECODED_COLUMNS, *arrow_fields(GradeColumns)])
(VOTE,) = arrow_fields(VoteColumns)


def graded_schema(rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The schema of graded rows, which have further columns where the sweep draws tokens."""
    drawn_schema = with_draws(GRADED_COLUMNS, rows)
    return drawn_schema if drawn_schema is GRADED_COLUMNS else pa.schema([*drawn_schema, VOTE])
