"""The timed cases of a batch: each configuration by itself, on some problems of each task, by one engine without other
work.

The parts of a batch mix configurations. So their seconds say nothing about one configuration, and rows have no
seconds.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from mbd_core.batch.rows import PlannedRow
from mbd_core.fields import Ge, configuration


@configuration()
class Timing:
    """How a configuration is timed on a task.

    problems     requests that are sent one at a time; 0: nothing is timed
    concurrency  requests under way at once in the second run; the run has twice as many requests, at least `problems`
    """

    problems: Annotated[int, Ge(0)] = 10
    concurrency: Annotated[int, Ge(1)] = 8

    def __str__(self) -> str:
        return f"--timed {self.problems} --concurrency {self.concurrency}"

    @property
    def together(self) -> int:
        """Requests of the second run, if the task has enough problems."""
        return max(self.problems, 2 * self.concurrency)


@dataclass(frozen=True)
class TimedCase:
    """One configuration of a model on one task, by rows of the plan. Their requests are sent `concurrency` at a time;
    the requests of the first `num_alone` rows are also sent one at a time."""

    number: int
    rows: Sequence[PlannedRow]
    num_alone: int

    @property
    def model(self) -> str:
        return str(self.rows[0]["model"])

    @property
    def buffer_size(self) -> int:
        return int(json.loads(self.rows[0]["config"])["buffer_size"])


def timed_cases(rows: Sequence[PlannedRow], timing: Timing) -> list[TimedCase]:
    """The cases of a sweep's rows. Cases of one model and buffer size stand together, since they share an engine.
    Problems are spread evenly over the task's problems, and are the same for all configurations."""
    if not timing.problems:
        return []
    groups: dict[tuple[str, str, str, str], list[PlannedRow]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["method"], row["config"], row["task"]), []).append(row)
    cases = [
        TimedCase(0, _timed_rows(of_case, timing), min(timing.problems, len(of_case))) for of_case in groups.values()
    ]
    models = list(dict.fromkeys(row["model"] for row in rows))
    cases.sort(key=lambda case: (models.index(case.model), case.buffer_size))
    return [replace(case, number=number) for number, case in enumerate(cases)]


def _timed_rows(rows: Sequence[PlannedRow], timing: Timing) -> list[PlannedRow]:
    """The problems that are sent one at a time, evenly spread, then further problems, evenly spread over the rest."""
    lone_rows = spread(rows, timing.problems)
    samples = {row["sample"] for row in lone_rows}
    other_rows = [row for row in rows if row["sample"] not in samples]
    return [*lone_rows, *spread(other_rows, timing.together - len(lone_rows))]


def spread(rows: Sequence[PlannedRow], count: int) -> list[PlannedRow]:
    """At most `count` rows, evenly spread."""
    count = min(count, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]
