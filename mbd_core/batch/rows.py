"""The columns of a batch's rows: as they are planned, and as they are decoded."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

# Every stage keeps the columns of its input and adds its own. `input` is what the model is given (`prompt_content`),
# `stop` the strings that end an answer, as JSON; decoding lowers `max_tokens` to what a model holds where the plan
# says `may_shorten`. A sample that cannot be decoded keeps its row, with the reason in `error`. `seconds` are an
# endpoint's, network included; an engine's batches mix configurations, so its rows have none. Counts that an endpoint
# does not say are null. `pieces` is each token's text, special ones included, `steps` the forward that accepted it,
# or was the last to overwrite it, from 1, and `edits` what was overwritten, by the place of the token: the decoding,
# to be replayed. An endpoint's rows have none, and folders of earlier versions lack them.

COUNTS = ("num_prompt_tokens", "num_tokens", "num_forwards", "num_store_forwards", "num_prefill_forwards")

PROBLEM_COLUMNS = ("problem_id", "prompt", "reference", "entry_point")  # what a grader needs of a problem

EDIT = pa.struct([("index", pa.int64()), ("step", pa.int64()), ("piece", pa.string())])
REPLAY = (
    pa.field("pieces", pa.list_(pa.string())),
    pa.field("steps", pa.list_(pa.int64())),
    pa.field("edits", pa.list_(EDIT)),
)

PLANNED_COLUMNS = pa.schema(
    [("sample", pa.int64())]
    + [(name, pa.string()) for name in ("model", "method", "task", *PROBLEM_COLUMNS, "config", "input", "stop")]
    + [("max_tokens", pa.int64()), ("may_shorten", pa.bool_()), ("seed", pa.int64())]
)
DECODED_COLUMNS = pa.schema(
    [*PLANNED_COLUMNS, pa.field("text", pa.string()), pa.field("finish_reason", pa.string())]
    + [pa.field(name, pa.int64()) for name in COUNTS]
    + [pa.field("seconds", pa.float64()), pa.field("error", pa.string()), *REPLAY]
)
# Of a batch that draws tokens also: an answer's number among its problem's, from 0, and how it is drawn, as JSON.
DRAWN_COLUMNS = (pa.field("draw", pa.int64()), pa.field("sampling", pa.string()))

LIKELIHOOD = "log-likelihood"
"""The method of rows whose texts are scored, which no decoder changes: one configuration of a model."""

Row = Mapping[str, Any]


def with_draws(schema: pa.Schema, rows: Sequence[Row]) -> pa.Schema:
    """The schema of rows, which have further columns where the batch draws tokens."""
    return pa.schema([*schema, *DRAWN_COLUMNS]) if rows and "draw" in rows[0] else schema


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that comes first; all of it without one."""
    return text[: min((place for s in stop if (place := text.find(s)) >= 0), default=len(text))]
