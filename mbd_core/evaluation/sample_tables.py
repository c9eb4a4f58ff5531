"""The columns of a sweep's samples after planning, after decoding and after grading.

Every stage keeps the columns of its input and adds its own. `input` is what the model is given (`prompts.worded`),
`stop` the strings that end an answer, as JSON; decoding lowers `max_tokens` to what a model holds where the plan says
`may_shorten`. A sample that cannot be decoded keeps its row, with the
reason in `error`. `seconds` are an endpoint's, network included; an engine's batches mix configurations, so its rows
have none. Counts that an endpoint does not say are null. `pieces` is each token's text, special ones included, `steps`
the forward that accepted it, or was the last to overwrite it, from 1, and `edits` what was overwritten, by the place
of the token: the decoding, to be replayed. An endpoint's rows have none, and folders of earlier versions lack them.
"""

import pyarrow as pa

COUNTS = ("num_prompt_tokens", "num_tokens", "num_forwards", "num_store_forwards", "num_prefill_forwards")

ISOLATION = b"mbd-isolation"  # of a graded part's metadata: how its programs were contained, where any ran

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
GRADED_COLUMNS = pa.schema(
    [*DECODED_COLUMNS, pa.field("correct", pa.bool_())]
    + [pa.field(name, pa.string()) for name in ("reason", "detail", "strict", "flexible")]
    + [pa.field(f"{name}_correct", pa.bool_()) for name in ("strict", "flexible", "base", "plus")]
)
