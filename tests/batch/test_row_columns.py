"""Arrow's columns follow from the types of rows: the names, order and types that written sweeps and rollouts have."""

from typing import TypedDict

import pyarrow as pa

from mbd_core.batch.rows import COUNTS, DECODED_COLUMNS, PLANNED_COLUMNS, PROBLEM_COLUMNS, REPLAY, arrow_fields
from mbd_core.evaluation.sweep.grading.graded_rows import GRADED_COLUMNS, graded_schema
from mbd_core.rl.rows import ROLLOUT_COLUMNS


def test_a_type_gives_its_columns_in_order() -> None:
    class Cell(TypedDict):
        place: int
        data: bytes

    class Columns(TypedDict, total=False):
        name: str | None
        share: float
        right: bool | None
        steps: list[int]
        cells: list[Cell] | None

    cell = pa.struct([("place", pa.int64()), ("data", pa.large_binary())])
    assert pa.schema(arrow_fields(Columns)) == pa.schema(
        [
            ("name", pa.string()),
            ("share", pa.float64()),
            ("right", pa.bool_()),
            ("steps", pa.list_(pa.int64())),
            ("cells", pa.list_(cell)),
        ]
    )


def test_written_folders_keep_their_columns() -> None:
    problem = ["problem_id", "prompt", "reference", "entry_point"]
    limits = ["max_tokens", "may_shorten", "seed"]
    counts = ["num_prompt_tokens", "num_tokens", "num_forwards", "num_store_forwards", "num_prefill_forwards"]
    replay = ["pieces", "steps", "edits"]
    planned = ["sample", "model", "method", "task", *problem, "config", "input", "stop", *limits]
    drafts = ["num_drafted_tokens", "num_confirmed_tokens", "num_positions"]
    decoded = [*planned, "text", "finish_reason", *counts, "seconds", "error", *replay, *drafts]
    verdicts = [f"{rule}_correct" for rule in ("strict", "flexible", "base", "plus")]
    graded = [*decoded, "correct", "reason", "detail", "strict", "flexible", *verdicts]
    assert (list(PROBLEM_COLUMNS), list(COUNTS), [field.name for field in REPLAY]) == (problem, counts, replay)
    assert (PLANNED_COLUMNS.names, DECODED_COLUMNS.names, GRADED_COLUMNS.names) == (planned, decoded, graded)
    assert graded_schema([{"draw": 0}]).names == [*graded, "draw", "sampling", "vote"]
    assert ROLLOUT_COLUMNS.names == [
        *decoded,
        *("draw", "sampling", "iteration", "group", "version", "prompt_tokens", "tokens", "tail_tokens"),
        *("tail_steps", "logprobs", "tail_logprobs", "experts"),
    ]
