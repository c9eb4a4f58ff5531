"""The benchmark tasks by name: how a row becomes a problem, and which rule grades an answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from mbd_core.evaluation.extraction import parse_number, strict_number
from mbd_core.tasks import code_mini, gsm_mini


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem. `prompt` is the user's question; `reference` is the right number (math) or the source of the tests
    (code), which call `check` with the function named `entry_point`."""

    problem_id: str
    prompt: str
    reference: str
    entry_point: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark: its columns, how a row becomes a problem, and the rule that grades an answer.

    `rule` is `strict` (the number after `####`), `flexible` (the last number) or `code` (the tests pass). `generate`
    draws rows; a task without it reads its rows from a file that the user names.
    """

    name: str
    label: str
    columns: tuple[str, ...]
    rule: Literal["strict", "flexible", "code"]
    problem: Callable[[str, dict[str, str]], Problem]
    generate: Callable[..., Iterator[dict[str, str]]] | None = None


def _math_problem(problem_id: str, row: dict[str, str]) -> Problem:
    number = strict_number(row["answer"])
    if number is None or parse_number(number) is None:
        raise ValueError("column 'answer' must end in '#### ' and a number")
    return Problem(problem_id=problem_id, prompt=row["question"], reference=number)


def _code_problem(_problem_id: str, row: dict[str, str]) -> Problem:
    if not row["entry_point"].isidentifier():
        raise ValueError(f"column 'entry_point' must be a function's name, not {row['entry_point']!r}")
    return Problem(
        problem_id=row["task_id"], prompt=row["prompt"], reference=row["test"], entry_point=row["entry_point"]
    )


MATH_COLUMNS = ("question", "answer")
CODE_COLUMNS = ("task_id", "prompt", "test", "entry_point")

TASKS: dict[str, Task] = {
    "gsm-mini": Task(
        name="gsm-mini",
        label="GSM-mini",
        columns=MATH_COLUMNS,
        rule="strict",
        problem=_math_problem,
        generate=gsm_mini.generate,
    ),
    "code-mini": Task(
        name="code-mini",
        label="Code-mini",
        columns=CODE_COLUMNS,
        rule="code",
        problem=_code_problem,
        generate=code_mini.generate,
    ),
    "gsm8k": Task(name="gsm8k", label="GSM8K", columns=MATH_COLUMNS, rule="flexible", problem=_math_problem),
    "humaneval": Task(name="humaneval", label="HumanEval", columns=CODE_COLUMNS, rule="code", problem=_code_problem),
}


def find_task(name: str) -> Task:
    """The task with that name; `ValueError` lists the known names."""
    if name not in TASKS:
        raise ValueError(f"unknown task '{name}'; known: {', '.join(TASKS)}")
    return TASKS[name]
