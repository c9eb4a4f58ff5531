"""A model's input: a problem in the words of a recipe, after the examples chosen for it."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mbd_core.checkpoint.chat import question
from mbd_core.evaluation.tasks.kinds.task import Problem, Task
from mbd_core.evaluation.tasks.problems import read_rows

PromptForm = Literal["turn", "turns", "plain"]


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The text around a problem.

    form     `turn`: one turn of the user, examples included; `turns`: every example is a turn of the user and one of
             the assistant; `plain`: text without a chat template
    text     the problem, with {question} (in words) and, for MBPP and LiveCodeBench, {tests}
    answer   the text around an example's answer, with {answer}
    joint    the text between an example's problem and its answer, if both are in one text
    separator the text between examples in one text
    system   the chat's system turn, if it has one
    """

    form: PromptForm = "turn"
    text: str = "{question}"
    answer: str = "{answer}"
    joint: str = " "
    separator: str = "\n\n"
    system: str = ""

    @property
    def needs_chat(self) -> bool:
        return self.form != "plain"


@dataclass(frozen=True, kw_only=True)
class FewShotExample:
    """A solved problem that stands before the question."""

    question: str
    answer: str
    tests: str = ""


def prompt_content(wording: Wording, problem: Problem, examples: Sequence[FewShotExample] = ()) -> str:
    """The model's input as JSON: the messages of a chat, or one text. `prompt_ids` takes it."""
    example_texts = [
        (wording.text.format(question=e.question, tests=e.tests), wording.answer.format(answer=e.answer))
        for e in examples
    ]
    query = wording.text.format(question=problem.text or problem.prompt, tests=problem.tests)
    system = [{"role": "system", "content": wording.system}] if wording.system else []
    if wording.form == "turns":
        turns = [turn for pair in example_texts for turn in zip(("user", "assistant"), pair, strict=True)]
        messages = [{"role": role, "content": content} for role, content in turns]
        return json.dumps([*system, *messages, *question(query)])
    prompt_text = wording.separator.join([*(text + wording.joint + answer for text, answer in example_texts), query])
    return json.dumps(prompt_text if wording.form == "plain" else [*system, *question(prompt_text)])


# The examples of a few-shot prompt: read from the user's file, and chosen for every problem.

ExampleChoice = Literal["first", "drawn"]
QUESTIONS = ("question", "problem", "text", "prompt")
ANSWERS = ("target", "solution", "code", "answer")
DRAW_SEED = 1234  # lm-eval's default for few-shot examples


def load_examples(task: Task, path: str) -> list[FewShotExample]:
    """The examples of a file, in its order: JSON lines in the task's own format, as of its train split.

    Raises `ValueError`, naming the file and the line, for a row without a question or an answer, and for an answer
    without the mark that the task's own rule reads.
    """
    return [_example(task, place, row) for _, place, row in read_rows(path)]


def _example(task: Task, place: str, row: Mapping[str, Any]) -> FewShotExample:
    question = next((row[name] for name in QUESTIONS if isinstance(row.get(name), str)), None)
    answer = next((row[name] for name in ANSWERS if isinstance(row.get(name), str)), None)
    if question is None or answer is None:
        missing_name, names = ("question", QUESTIONS) if question is None else ("answer", ANSWERS)
        raise ValueError(f"{place}: an example needs its {missing_name} in one of the columns {', '.join(names)}")
    mark = task.grader.mark
    if mark is not None and mark not in answer:
        raise ValueError(f"{place}: the example's answer lacks '{mark}', from which {task.name} reads a number")
    tests = row.get("test_list") or []
    # MBPP's code has the line ends of another system
    return FewShotExample(
        question=question.strip(), answer=answer.replace("\r\n", "\n").strip(), tests="\n".join(tests)
    )


def choose_examples(
    examples: Sequence[FewShotExample], *, count: int, choice: ExampleChoice
) -> Iterator[list[FewShotExample]]:
    """The examples of each problem in turn: the first `count`, or `count` examples drawn anew for each problem.

    The draw is lm-eval's: one generator with the seed 1234, asked once for each problem in the file's order.
    """
    assert count <= len(examples)
    generator = random.Random(DRAW_SEED)
    while True:
        yield list(examples[:count]) if choice == "first" else generator.sample(list(examples), count)
