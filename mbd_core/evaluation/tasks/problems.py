"""The problems of a task: from its generator, or from the rows of a benchmark."""

import datetime
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mbd_core.errors import error_line
from mbd_core.evaluation.tasks.kinds.task import Problem, Task
from mbd_core.proxies import connection_note
from mbd_core.row_files.paths import NumberedRow, read_row_files
from mbd_core.row_files.rows import FORMATS
from mbd_core.tasks.split import Split

# A benchmark's rows: from files in any format of the hubs, or from a data set of the Hugging Face hub itself.

HUB, HUB_URL = "hub:", "https://huggingface.co"


def read_rows(path: str) -> Iterator[NumberedRow]:
    """The rows of a benchmark, each with its number and its place in words, as `FILE, line N`.

    `path` names files (`read_row_files`), or `hub:NAME[:CONFIGURATION[:SPLIT]]` (by default the split `test`), which
    the package `datasets` loads. Raises `ValueError`, one sentence, if a file or the data set cannot be read.
    """
    return _hub_rows(path) if path.startswith(HUB) else read_row_files(path)


def _hub_rows(path: str) -> Iterator[NumberedRow]:
    name, _, split_name = path.removeprefix(HUB).partition(":")
    configuration, _, split = split_name.partition(":")
    if not name:
        raise ValueError(f"{path} names no data set; write {HUB}NAME, or {HUB}NAME:CONFIGURATION:SPLIT")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"{path} cannot be read without the package datasets (pip install 'mbd-cluster[hub]')"
        ) from None
    try:
        rows = load_dataset(name, configuration or None, split=split or "test")
    except Exception as error:  # datasets raises errors of many classes for a wrong name or split, or a network
        raise ValueError(f"{path} cannot be loaded: {error_line(error)}{connection_note(error, HUB_URL)}") from None
    for number, row in enumerate(rows, start=1):
        yield number, f"{path}, row {number}", dict(row)


DEFAULT_LIMIT = 500
MOST_GENERATED = 1_000_000  # a task has no last problem that could end a larger limit soon


@dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """A task's problems and their source: a file, or a generator's split and seed."""

    task: Task
    source: str
    problems: tuple[Problem, ...]

    @property
    def sha256(self) -> str:
        """A hash of all problems: reports with the same hash have the same problems."""
        text = "\n".join(json.dumps(asdict(p), sort_keys=True) for p in self.problems)
        return hashlib.sha256(text.encode()).hexdigest()


def load_problems(
    task: Task, *, split: Split = "test", seed: int = 0, limit: int | None = None, data: str | None = None
) -> ProblemSet:
    """The first `limit` problems of a task.

    A generated task takes `split` and `seed`, and 500 problems by default. The other tasks read `data`, which names a
    file of rows or a data set of the hub (`read_rows`), by default all of it. Raises `ValueError` for a limit
    below 1, for `data` that is missing or not wanted, and for a malformed row, naming the file, the line and the
    reason.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1")
    if task.packaged is not None:
        source = data or f"the package of {task.benchmark}"
        return ProblemSet(
            task=task, source=source, problems=tuple(_problems(task, task.packaged(data), source)[:limit])
        )
    if task.generate is None:
        if data is None:
            raise ValueError(
                f"task '{task.name}' needs the file of its problems ({FORMATS}): give --data PATH, or with several "
                f"tasks --data {task.name}=PATH"
            )
        return ProblemSet(task=task, source=data, problems=tuple(_problems(task, read_rows(data), data)[:limit]))
    if data is not None:
        raise ValueError(f"task '{task.name}' is generated and takes no data file; given {data}")
    if limit is not None and limit > MOST_GENERATED:
        raise ValueError(f"limit={limit} of task '{task.name}': at most {MOST_GENERATED} problems are generated")
    source = f"{task.name}/{split}/{seed}"
    rows = itertools.islice(task.generate(split=split, seed=seed), limit or DEFAULT_LIMIT)
    problems = tuple(task.problem(f"{source}/{number}", row) for number, row in enumerate(rows))
    return ProblemSet(task=task, source=f"generated: split {split}, seed {seed}", problems=problems)


def _problems(task: Task, rows: Iterator[NumberedRow], source: str) -> list[Problem]:
    problems: list[Problem] = []
    place_of: dict[str, str] = {}
    for number, place, row in rows:
        try:
            row_values = _checked_row(row, task=task)
            if not task.is_asked(row_values):
                continue
            problem = task.problem(f"{task.name}/{number}", row_values)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if problem.problem_id in place_of:
            first = place_of[problem.problem_id].rpartition(", ")[2]
            raise ValueError(f"{place}: '{problem.problem_id}' is already on {first}")
        place_of[problem.problem_id] = place
        problems.append(problem)
    if not problems:
        raise ValueError(f"{source} holds no problems of task '{task.name}'")
    return problems


def _checked_row(row: Mapping[str, Any], *, task: Task) -> Mapping[str, Any]:
    """The row, with the task's columns in their types; further columns stay."""
    columns = task.columns
    for column, kind in columns.items():
        if column not in row:
            what_to_do = f"; {task.other_form}" if task.other_form else ""
            raise ValueError(
                f"no column '{column}'; a row needs {', '.join(columns)}, and has {', '.join(row)}{what_to_do}"
            )
        if not isinstance(row[column], kind):
            kind_names = " or ".join(_KINDS[each] for each in kind)
            raise ValueError(f"column '{column}' must be {kind_names}, not {type(row[column]).__name__}")
    return row


_KINDS: dict[type, str] = {
    str: "text",
    list: "a list",
    int: "a whole number",
    float: "a number",
    datetime.datetime: "a date",
}
