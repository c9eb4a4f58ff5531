"""The examples of a few-shot prompt: read from the user's file, and chosen for every problem."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from mbd_core.evaluation.prompts import Example
from mbd_core.evaluation.row_files import read_rows
from mbd_core.evaluation.tasks import Task

Choice = Literal["first", "drawn"]
QUESTIONS = ("question", "problem", "text", "prompt")
ANSWERS = ("target", "solution", "code", "answer")
DRAW_SEED = 1234  # lm-eval's default for few-shot examples


def load_examples(task: Task, path: str) -> list[Example]:
    """The examples of a file, in its order: JSON lines in the task's own format, as of its train split.

    Raises `ValueError`, naming the file and the line, for a row without a question or an answer, and for an answer
    without the mark that the task's own rule reads.
    """
    return [_example(task, place, row) for _, place, row in read_rows(path)]


def _example(task: Task, place: str, row: dict[str, Any]) -> Example:
    asked = next((row[name] for name in QUESTIONS if isinstance(row.get(name), str)), None)
    answer = next((row[name] for name in ANSWERS if isinstance(row.get(name), str)), None)
    if asked is None or answer is None:
        missing, names = ("question", QUESTIONS) if asked is None else ("answer", ANSWERS)
        raise ValueError(f"{place}: an example needs its {missing} in one of the columns {', '.join(names)}")
    if task.rule == "flexible" and task.mark not in answer:
        raise ValueError(f"{place}: the example's answer lacks '{task.mark}', from which {task.name} reads a number")
    tests = row.get("test_list") or []
    # MBPP's code has the line ends of another system
    return Example(question=asked.strip(), answer=answer.replace("\r\n", "\n").strip(), tests="\n".join(tests))


def choose_examples(examples: Sequence[Example], *, count: int, choice: Choice) -> Iterator[list[Example]]:
    """The examples of problem after problem: the first `count`, or `count` that are drawn anew for each.

    The draw is lm-eval's: one generator with the seed 1234, asked once for each problem in the file's order.
    """
    assert count <= len(examples)
    generator = random.Random(DRAW_SEED)
    while True:
        yield list(examples[:count]) if choice == "first" else generator.sample(list(examples), count)
