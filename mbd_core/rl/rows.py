"""The rows of rollouts, as they are asked, decoded and scored: types for a checker, and their Arrow columns."""

from typing import TypedDict

import pyarrow as pa

from mbd_core.batch.rows import (
    DECODED_COLUMNS,
    DRAWN_COLUMNS,
    PLANNED_COLUMNS,
    AnswerColumns,
    DraftColumns,
    EndColumns,
    PlannedRow,
    ReplayColumns,
    arrow_fields,
)
from mbd_core.decoding.answers.piece import ExpertCell
from mbd_core.evaluation.sweep.grading.graded_rows import GradeColumns


class PlaceColumns(TypedDict):
    """The iteration that asks, and the group: all answers to one prompt."""

    iteration: int
    group: int


class RecordColumns(TypedDict, total=False):
    """Whether the experts that tokens go to are recorded. Decoded tables lack this column."""

    record_experts: bool


class AskedRow(PlannedRow, PlaceColumns, RecordColumns):
    """A rollout that an iteration asks for."""


class EngineCountColumns(TypedDict, total=False):
    """The answer's counts (`CountColumns`), all of which an engine gives."""

    num_prompt_tokens: int
    num_tokens: int
    num_forwards: int
    num_store_forwards: int
    num_prefill_forwards: int


class RolloutColumns(TypedDict, total=False):
    """The columns that a replay needs beside `steps`, and the version of the weights that decoded every token.

    experts  the experts of the answer's forwards, if they are recorded
    """

    version: int
    prompt_tokens: list[int]
    tokens: list[int]
    tail_tokens: list[int]
    tail_steps: list[int]
    logprobs: list[float]
    tail_logprobs: list[float]
    experts: list[ExpertCell] | None


class OutputColumns(AnswerColumns, EngineCountColumns, DraftColumns, ReplayColumns, RolloutColumns):
    """An engine's answer for a rollout."""


class RolloutRow(AskedRow, OutputColumns, EndColumns):
    """A rollout that was decoded, or that could not be decoded for the reason in `error`."""


class JudgedRow(PlannedRow, AnswerColumns, EngineCountColumns, EndColumns, GradeColumns):
    """A graded rollout and its group, for which a reward is asked."""

    group: int


class ScoreColumns(TypedDict):
    """The columns that scoring adds: the grade and its reason, whether an answer met its limit of tokens, and the
    parts of its reward as JSON, or the part that failed and why."""

    correct: bool
    overlong: bool
    reason: str | None
    rewards: str | None
    failure: str | None


class ScoredRow(RolloutRow, ScoreColumns):
    """A rollout with its scores."""


PLACE = arrow_fields(PlaceColumns)
ASKED_COLUMNS = pa.schema([*PLANNED_COLUMNS, *DRAWN_COLUMNS, *PLACE, *arrow_fields(RecordColumns)])
ROLLOUT_COLUMNS = pa.schema([*DECODED_COLUMNS, *DRAWN_COLUMNS, *PLACE, *arrow_fields(RolloutColumns)])
SCORES = pa.schema(arrow_fields(ScoreColumns))
