"""The problems of a task, from a generator or from a JSON-lines file."""

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import fsspec

from mbd_core.evaluation.tasks import Problem, Task
from mbd_core.tasks.split import Split

DEFAULT_LIMIT = 500


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

    A generated task takes `split` and `seed`, and 500 problems by default. The other tasks read `data`, the path or
    fsspec URL of a JSON-lines file, plain or gzipped, by default all of it. Raises `ValueError` for a limit below 1,
    for `data` that is missing or not wanted, and for a malformed file, naming the file, the line and the reason.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1")
    if task.generate is None:
        if data is None:
            raise ValueError(f"task '{task.name}' needs a JSON-lines file: --data {task.name}=PATH")
        return ProblemSet(task=task, source=data, problems=tuple(_read_problems(task, data)[:limit]))
    if data is not None:
        raise ValueError(f"task '{task.name}' is generated and takes no data file; given {data}")
    source = f"{task.name}/{split}/{seed}"
    rows = itertools.islice(task.generate(split=split, seed=seed), limit or DEFAULT_LIMIT)
    problems = tuple(task.problem(f"{source}/{number}", row) for number, row in enumerate(rows))
    return ProblemSet(task=task, source=f"generated: split {split}, seed {seed}", problems=problems)


def _read_problems(task: Task, path: str) -> list[Problem]:
    problems: list[Problem] = []
    line_of: dict[str, int] = {}
    for number, line in _numbered_lines(path):
        try:
            problem = task.problem(f"{task.name}/{number}", _checked_row(line, columns=task.columns))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if problem.problem_id in line_of:
            first = line_of[problem.problem_id]
            raise ValueError(f"{path}, line {number}: '{problem.problem_id}' is already on line {first}")
        line_of[problem.problem_id] = number
        problems.append(problem)
    if not problems:
        raise ValueError(f"{path} holds no problems")
    return problems


def _numbered_lines(path: str) -> Iterator[tuple[int, str]]:
    """The file's lines that are not blank, counted from 1."""
    number = 0
    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield number, raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}, after line {number}: damaged gzip data ({error})") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ImportError as error:
        raise ValueError(f"{path} cannot be read without a package that is not installed: {error}") from None


def _checked_row(line: str, *, columns: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """The row, whose columns are there and of their types; it may have others."""
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not a JSON object")
    for column, kind in columns.items():
        if column not in row:
            raise ValueError(f"no column '{column}'; a row needs {', '.join(columns)}")
        if not isinstance(row[column], kind):
            wanted = " or ".join(_KINDS[k] for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ValueError(f"column '{column}' must be {wanted}, not {type(row[column]).__name__}")
    return row


_KINDS: dict[type, str] = {str: "text", list: "a list", int: "a whole number", float: "a number"}
