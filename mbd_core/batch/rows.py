"""The rows of a batch, planned and decoded: types for a checker, and their Arrow columns.

Every stage keeps the columns of its input and adds its own. If the batch draws tokens, a row has further columns.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from types import UnionType
from typing import Any, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

import pyarrow as pa

from mbd_core.decoding.blocks.config import DecodingConfig, read_decoding

LIKELIHOOD = "log-likelihood"
"""The method of rows whose texts are scored. No decoder changes a score, so a model has one such configuration."""


class SubjectColumns(TypedDict):
    """The sample's identity."""

    sample: int
    model: str
    method: str
    task: str


class ProblemColumns(TypedDict):
    """The columns of a problem that its grader reads."""

    problem_id: str
    prompt: str
    reference: str
    entry_point: str


class ConfigColumns(TypedDict):
    """The decoding configuration, as JSON."""

    config: str


class InputColumns(TypedDict):
    """The model's input (`batch/inputs.py`), and the strings that end an answer, both as JSON.

    If `may_shorten` is set, decoding lowers `max_tokens` to the room that the model has.
    """

    input: str
    stop: str
    max_tokens: int
    may_shorten: bool


class PlannedColumns(SubjectColumns, ProblemColumns, ConfigColumns, InputColumns):
    """The columns that decoding reads, and the seed of the sample."""

    seed: int


class DrawnColumns(TypedDict, total=False):
    """Columns of a batch that draws tokens: an answer's number among the answers to its problem, from 0, and how it is
    drawn, as JSON."""

    draw: int
    sampling: str


class PlannedRow(PlannedColumns, DrawnColumns):
    """A sample that is to be decoded."""


class AnswerColumns(TypedDict, total=False):
    """The answer; null where a sample cannot be decoded."""

    text: str | None
    finish_reason: str | None


class CountColumns(TypedDict, total=False):
    """The answer's counts. A count that an endpoint does not report is null."""

    num_prompt_tokens: int | None
    num_tokens: int | None
    num_forwards: int | None
    num_store_forwards: int | None
    num_prefill_forwards: int | None


class DraftColumns(TypedDict, total=False):
    """The number of drafted tokens that verifications judged, the number that they confirmed, and the number of
    positions that the forwards computed. Folders of earlier versions lack them."""

    num_drafted_tokens: int | None
    num_confirmed_tokens: int | None
    num_positions: int | None


class EndColumns(TypedDict, total=False):
    """How a request ended: an endpoint's seconds, network included, and why a sample was not decoded.

    An engine's batches mix configurations, so its rows have no seconds.
    """

    seconds: float | None
    error: str | None


class EditCell(TypedDict):
    """A token that was overwritten: its place in the answer, the forward that accepted it, its text."""

    index: int
    step: int
    piece: str


class ReplayColumns(TypedDict, total=False):
    """The decoding, to be replayed. An endpoint's rows and folders of earlier versions lack these columns.

    pieces  each token's text, special ones included
    steps   the forward that accepted the token, or was the last to overwrite it, from 1
    edits   overwritten tokens
    """

    pieces: list[str] | None
    steps: list[int]
    edits: list[EditCell] | None


class DecodedRow(PlannedRow, AnswerColumns, CountColumns, EndColumns, ReplayColumns, DraftColumns):
    """A sample that was decoded, or was not, for the reason in `error`."""


class TimedRow(TypedDict):
    """A request of a timed case; `run` is `alone` or `together`. In a row with an `error` the columns after
    `problem_id` are null.

    begun, ended    when the engine got the request, and when it gave the answer, in seconds of one clock
    decode_seconds  the seconds of the forwards that NFE counts
    """

    model: str
    method: str
    task: str
    config: str
    problem_id: str
    run: str
    concurrency: int
    num_tokens: int
    num_forwards: int
    begun: float
    ended: float
    decode_seconds: float
    error: str | None


ARROW_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_(), bytes: pa.large_binary()}


def arrow_fields(columns: type) -> list[pa.Field]:
    """Arrow's fields of the columns that a `TypedDict` names, in its order."""
    return [pa.field(name, _arrow_type(hint)) for name, hint in get_type_hints(columns).items()]


def _arrow_type(hint: Any) -> pa.DataType:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is list:
        return pa.list_(_arrow_type(get_args(hint)[0]))
    return pa.struct(arrow_fields(hint)) if is_typeddict(hint) else ARROW_TYPES[hint]


COUNTS = tuple(CountColumns.__annotations__)
PROBLEM_COLUMNS = tuple(ProblemColumns.__annotations__)
DRAWN_COLUMNS = arrow_fields(DrawnColumns)
REPLAY = arrow_fields(ReplayColumns)
DRAFTS = tuple(DraftColumns.__annotations__)
TIMED_COLUMNS = pa.schema(arrow_fields(TimedRow))
PLANNED_COLUMNS = pa.schema(arrow_fields(PlannedColumns))
DECODED_COLUMNS = pa.schema(
    [
        *PLANNED_COLUMNS,
        *arrow_fields(AnswerColumns),
        *arrow_fields(CountColumns),
        *arrow_fields(EndColumns),
        *REPLAY,
        *arrow_fields(DraftColumns),
    ]
)


def config_text(decoding: DecodingConfig | None) -> str:
    """A row's `config`; `{}` of an endpoint that chooses its own decoding."""
    return json.dumps({} if decoding is None else asdict(decoding))


@cache
def current_config(text: str) -> str:
    """A row's `config` as this version writes it, so that texts of equal configurations are equal: an earlier version
    may have written 1 for 1.0, or lack a field that was added since. A text that this version does not read is
    unchanged."""
    try:
        return config_text(read_decoding(json.loads(text)))
    except ValueError:
        return text


def with_draws(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The schema of rows, which have further columns where the batch draws tokens."""
    return pa.schema([*schema, *DRAWN_COLUMNS]) if rows and "draw" in rows[0] else schema


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string; the whole text if it has none."""
    return text[: min((place for s in stop if (place := text.find(s)) >= 0), default=len(text))]
