"""The generated tasks by name: the stream of problems of each, and its columns of question and answer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from mbd_core.tasks import code_mini, gsm_mini, ledger_mini
from mbd_core.tasks.split import Split


class Generate(Protocol):
    """A stream of rows of one split, without repeats; a seed always gives the same stream."""

    def __call__(self, *, split: Split, seed: int) -> Iterator[dict[str, str]]: ...


@dataclass(frozen=True, kw_only=True)
class GeneratedTask:
    """A task whose problems are drawn, and the columns of a row with the question and its whole right answer."""

    generate: Generate
    question_column: str
    answer_column: str


GENERATED_TASKS = {
    "gsm-mini": GeneratedTask(generate=gsm_mini.generate, question_column="question", answer_column="answer"),
    "code-mini": GeneratedTask(
        generate=code_mini.generate, question_column="prompt", answer_column="canonical_solution"
    ),
    "ledger-mini": GeneratedTask(generate=ledger_mini.generate, question_column="question", answer_column="answer"),
}
