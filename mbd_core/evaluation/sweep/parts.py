"""A sweep cut into parts, which are decoded, graded and written whole or not at all, and into cases, which are timed.

How a sweep is cut follows from its plan and from the size of a part alone, and an engine decodes a part from an empty
state. So a part has the same rows and the same numbers whenever, wherever and after whatever interruption it is made.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa

# The columns of a sweep's samples after planning, after decoding and after grading.
#
# Every stage keeps the columns of its input and adds its own. `input` is what the model is given (`prompt_content`),
# `stop` the strings that end an answer, as JSON; decoding lowers `max_tokens` to what a model holds where the plan
# says `may_shorten`. A sample that cannot be decoded keeps its row, with the reason in `error`. `seconds` are an
# endpoint's, network included; an engine's batches mix configurations, so its rows have none. Counts that an endpoint
# does not say are null. `pieces` is each token's text, special ones included, `steps` the forward that accepted it,
# or was the last to overwrite it, from 1, and `edits` what was overwritten, by the place of the token: the decoding,
# to be replayed. An endpoint's rows have none, and folders of earlier versions lack them.

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

# Of a sweep that draws tokens also: the number of the answer among its problem's, from 0, and how it is drawn, as
# JSON; graded, the answer that stands for all that the grader takes as equal to it.
DRAWN_COLUMNS = (pa.field("draw", pa.int64()), pa.field("sampling", pa.string()))
VOTE = pa.field("vote", pa.string())


def with_draws(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """The schema of rows, which have further columns where the sweep draws tokens."""
    if not rows or "draw" not in rows[0]:
        return schema
    return pa.schema([*schema, *DRAWN_COLUMNS, *([VOTE] if schema is GRADED_COLUMNS else [])])


Row = Mapping[str, Any]
AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class Part:
    """Some rows of a sweep's plan (`PLANNED_COLUMNS`), of one model, with all configurations of each problem."""

    number: int
    rows: Sequence[Row]

    @property
    def model(self) -> str:
        return str(self.rows[0]["model"])

    def table(self) -> pa.Table:
        return pa.Table.from_pylist([dict(row) for row in self.rows], schema=with_draws(PLANNED_COLUMNS, self.rows))


@dataclass(frozen=True)
class SweepShard:
    """The part of a sweep that one of several jobs computes: every `count`-th part, from the `index`-th, from 1."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "SweepShard":
        """`i/n`; `ValueError` for anything else."""
        first, slash, second = text.partition("/")
        if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
            raise ValueError(f"--shard {text} must be i/n, the i-th of n shards, i from 1 to n")
        return cls(int(first), int(second))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, number: int) -> bool:
        """Whether the part with this number is of this shard."""
        return number % self.count == self.index - 1


def part_size(num_rows: int, *, max_rows: int) -> int:
    """The rows of a part: four batches of `max_rows`, fewer in a small sweep, so that it too has parts for several
    engines, but at least one. It depends on nothing but the plan, so that all shards are cut alike."""
    return max(max_rows, min(4 * max_rows, -(-num_rows // 16)))


def cut(rows: Iterable[Row], *, rows_per_part: int) -> list[Part]:
    """The parts, in the order in which they are best decoded: of each model the longest prompts first.

    A part has at most `rows_per_part` rows, or the rows of one problem. Long prompts first, so that what is left at
    the end, when engines run out of parts, is short.
    """
    problems: dict[str, dict[tuple[str, str], list[Row]]] = {}
    for row in rows:
        problems.setdefault(row["model"], {}).setdefault((row["task"], row["problem_id"]), []).append(row)
    parts: list[list[Row]] = []
    for of_model in problems.values():
        current: list[Row] = []
        for group in sorted(of_model.values(), key=lambda group: -len(group[0]["prompt"])):
            if current and len(current) + len(group) > rows_per_part:
                parts.append(current)
                current = []
            current = [*current, *group]
        parts.append(current)
    return [Part(number, part) for number, part in enumerate(parts)]


def in_turns(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """The rows in the order in which they share prefixes best: the first of each prompt, then the second of each.

    Requests that begin in one forward find nothing of each other in the cache; those that begin later do.
    """
    turns: Counter[str] = Counter()
    places = []
    for row in rows:
        places.append(turns[row["input"]])
        turns[row["input"]] += 1
    return [row for _, row in sorted(zip(places, rows, strict=True), key=lambda pair: pair[0])]


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the stop string that comes first; all of it without one."""
    return text[: min((place for s in stop if (place := text.find(s)) >= 0), default=len(text))]


# What a sweep times: every configuration by itself on some problems of each task, one engine and nothing beside it.
#
# The sweep's own batches mix configurations, so their seconds tell nothing about any of them, and its rows have none.


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How a configuration is timed on a task.

    problems     requests that are sent one at a time; 0: nothing is timed
    concurrency  requests that are always under way in the second run, which has twice as many and at least `problems`
    """

    problems: int = 10
    concurrency: int = 8

    def __str__(self) -> str:
        return f"--timed {self.problems} --concurrency {self.concurrency}"

    @property
    def together(self) -> int:
        """Requests of the run at `concurrency`, where the task has as many problems."""
        return max(self.problems, 2 * self.concurrency)


@dataclass(frozen=True)
class TimedCase:
    """One configuration of a model on one task: rows of the plan, the first `num_alone` of them also for requests that
    are sent one at a time."""

    number: int
    rows: Sequence[Row]
    num_alone: int

    @property
    def model(self) -> str:
        return str(self.rows[0]["model"])

    @property
    def buffer_size(self) -> int:
        return int(json.loads(self.rows[0]["config"])["buffer_size"])


def timed_cases(rows: Sequence[Row], timing: Timing) -> list[TimedCase]:
    """The cases of a sweep's rows: those of one model and buffer size stand together, since an engine is built for
    them. The problems are spread evenly over the task's, so that all configurations are timed on the same ones."""
    if not timing.problems:
        return []
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["method"], row["config"], row["task"]), []).append(row)
    cases = [
        TimedCase(0, _timed_rows(of_case, timing), min(timing.problems, len(of_case))) for of_case in groups.values()
    ]
    models = list(dict.fromkeys(row["model"] for row in rows))
    cases.sort(key=lambda case: (models.index(case.model), case.buffer_size))
    return [replace(case, number=number) for number, case in enumerate(cases)]


def _timed_rows(rows: Sequence[Row], timing: Timing) -> list[Row]:
    """Those that are sent one at a time, evenly spread, then the further ones, evenly spread over the rest."""
    lone_rows = spread(rows, timing.problems)
    samples = {row["sample"] for row in lone_rows}
    other_rows = [row for row in rows if row["sample"] not in samples]
    return [*lone_rows, *spread(other_rows, timing.together - len(lone_rows))]


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` rows, evenly spread."""
    count = min(count, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]


def config_of(row: Mapping[str, str]) -> tuple[str, str, str, str]:
    """What a timed row is about: model, method, task and configuration."""
    return (row["model"], row["method"], row["task"], row["config"])
