"""Sweeps' folders made by hand, without a model.

Rows follow from their numbers, so that a sweep that was interrupted can be compared with one that was not.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from mbd_core.batch.parts import Part, cut
from mbd_core.batch.rows import COUNTS, TIMED_COLUMNS, config_text
from mbd_core.batch.timed_cases import Timing
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.evaluation.report.summary import write_summary
from mbd_core.evaluation.sweep.folder import SweepFolder
from mbd_core.evaluation.sweep.grading.graded_rows import GRADED_COLUMNS
from mbd_core.evaluation.sweep.record import ROWS, SweepRecord
from mbd_core.evaluation.sweep.shard import SweepShard

WHOLE = SweepShard()
TIMING = Timing(problems=2, concurrency=3)
CONFIGS = tuple(config_text(DecodingConfig(block_size=4, tau_m2t=tau)) for tau in (0.7, 0.9))


def planned_rows(
    *, models: Sequence[str] = ("m",), tasks: Sequence[str] = ("a", "b"), problems: int = 10
) -> list[Any]:
    """The plan's rows: every problem of every task, whose prompt is as long as its number, by two configurations."""
    subjects = (
        {"model": model, "method": "MBD", "task": task, "problem_id": f"{task}/{number}", "config": config}
        for model in models
        for task in tasks
        for number in range(problems)
        for config in CONFIGS
    )
    fields = {"reference": "4", "entry_point": "", "max_tokens": 8, "seed": 0}
    return [
        {"sample": number, **row, "prompt": "?" * int(row["problem_id"][2:]), **fields}
        for number, row in enumerate(subjects)
    ]


def sweep_record(
    rows: Sequence[Any],
    parts: Sequence[Part],
    *,
    shard: SweepShard = WHOLE,
    num_cases: int = 0,
    timing: Timing = TIMING,
    **plan: Any,
) -> SweepRecord:
    """The record of a sweep of `rows`, with other values of its plan where they are given."""
    tasks = dict.fromkeys(row["task"] for row in rows)
    problems = {task: len({row["problem_id"] for row in rows if row["task"] == task}) for task in tasks}
    models = dict.fromkeys(row["model"] for row in rows)
    return SweepRecord(
        plan={
            "models": dict.fromkeys(models, "digest"),
            "configurations": {model: [["MBD", config] for config in CONFIGS] for model in models},
            "tasks": {
                task: {"problems": problems[task], "rule": "strict", "max_tokens": 8, "sha256": "0"} for task in tasks
            },
            "seed": 0,
            "max_rows": 4,
            "num_pages": None,
            "kv_memory_fraction": 0.9,
            "tensor_parallel": 1,
            "rows": ROWS,
            "versions": dict.fromkeys(("mbd-cluster", "torch", "transformers", "math-verify"), "1"),
            **plan,
        },
        shard=shard,
        num_parts=len(parts),
        num_cases=num_cases,
        timing=timing,
        labels={task: task.upper() for task in tasks},
        settings={"seed": 0, "machines": []},
    )


def graded_table(part: Part) -> pa.Table:
    """The part as it comes back: what its rows hold follows from their numbers."""
    rows = [
        {
            **row,
            **dict.fromkeys(COUNTS, 1),
            "text": f"answer {row['sample']}",
            "num_tokens": 5 + row["sample"] * 7919 % 97,
            "num_forwards": 1 + row["sample"] * 31 % 13,
            "correct": row["sample"] % 3 > 0,
        }
        for row in part.rows
    ]
    return pa.Table.from_pylist(rows, schema=GRADED_COLUMNS)


def timed_table(row: dict[str, Any]) -> pa.Table:
    """The timed requests of a row's configuration: one alone, two together."""
    of_case = {name: row[name] for name in ("model", "method", "task", "config", "problem_id")}
    seconds = {"num_tokens": 6, "num_forwards": 2, "begun": 0.0, "ended": 3.0, "decode_seconds": 1.0}
    runs = (("alone", 1), ("together", 2), ("together", 2))
    return pa.Table.from_pylist(
        [{**of_case, **seconds, "run": run, "concurrency": count} for run, count in runs], schema=TIMED_COLUMNS
    )


def write_parts(
    path: Path,
    *,
    shard: SweepShard = WHOLE,
    seconds: float = 0.0,
    overwrite: bool = False,
    done: Callable[[int], None] = lambda _: None,
    **size: Any,
) -> str:
    """Write what is missing of a sweep, a part in `seconds`, and its report; the report."""
    rows = planned_rows(**size)
    parts = cut(rows, rows_per_part=4)
    with SweepFolder.claim(path, sweep_record(rows, parts, shard=shard), overwrite=overwrite) as folder:
        for number in folder.missing():
            time.sleep(seconds)
            folder.write_part(number, graded_table(parts[number]))
            done(number)
        return write_summary(folder).text


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A sweep's folder whose one part holds these rows, whatever columns they have."""
    rows_of_plan = planned_rows(problems=1, tasks=("a",))
    with SweepFolder.claim(path, sweep_record(rows_of_plan, [Part(0, rows_of_plan)])) as folder:
        folder.write_part(0, pa.Table.from_pylist(list(rows)))
