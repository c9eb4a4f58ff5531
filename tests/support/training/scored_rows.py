"""Rollouts of one prompt as rows, and their scores."""

import json
from typing import Any

import pyarrow as pa

from mbd_core.rl.rewards import RewardConfig, score_table
from mbd_core.rl.rollouts import ROLLOUT_COLUMNS

ROW = {
    "task": "gsm-mini",
    "problem_id": "p1",
    "prompt": "Tom has 3.",
    "reference": "5",
    "entry_point": "",
    "error": None,
    "finish_reason": "stop",
    "num_tokens": 12,
    "num_forwards": 4,
}


def scores(changes: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    """The scores of rows that differ from `ROW` by these changes."""
    table = pa.Table.from_pylist([ROW | change for change in changes], schema=ROLLOUT_COLUMNS)
    rows: list[dict[str, Any]] = score_table(table, RewardConfig(**settings)).to_pylist()
    return [row | {"rewards": json.loads(row["rewards"] or "null")} for row in rows]


def rewards_of(name: str, texts: list[str], **settings: Any) -> list[Any]:
    """What one part gives for texts: a number, `None`, or why it failed."""
    found = scores([{"text": text} for text in texts], rewards={name: 1.0}, **settings)
    return [row["rewards"][name] if row["rewards"] is not None else row["failure"] for row in found]
