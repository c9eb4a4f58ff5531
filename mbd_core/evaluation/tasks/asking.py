"""The inputs of a sweep's models: every task's problems in the words of a recipe, with the limits of their answers."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mbd_core.batch.rows import InputColumns
from mbd_core.evaluation.tasks.kinds.task import Problem, Task
from mbd_core.evaluation.tasks.problems import ProblemSet
from mbd_core.evaluation.tasks.prompts import FewShotExample, choose_examples, load_examples, prompt_content
from mbd_core.evaluation.tasks.recipes import Recipe, TaskPrompt


@dataclass(frozen=True, kw_only=True)
class TaskInputs:
    """A model's inputs for the problems of a task.

    inputs         one for each problem, as `prompt_content` made them
    max_tokens     an answer's tokens, at most
    may_shorten    whether an answer may get fewer tokens if a model has too few positions
    examples_from  the file of the examples, if there are any, and `examples_sha256` a hash of its examples
    """

    prompt: TaskPrompt
    inputs: tuple[str, ...]
    max_tokens: int
    may_shorten: bool
    examples_from: str | None = None
    examples_sha256: str | None = None
    scores: bool = False
    """Whether the inputs are texts to score (`ScoredTexts`), and nothing is decoded."""

    def columns(self, number: int) -> InputColumns:
        """The planned columns of a problem that concern its prompt and its end."""
        return {
            "input": self.inputs[number],
            "stop": json.dumps(self.prompt.stop),
            "max_tokens": self.max_tokens,
            "may_shorten": self.may_shorten,
        }

    @property
    def record(self) -> dict[str, Any]:
        """Its part of a report."""
        return {
            "examples": self.prompt.num_examples,
            "examples_from": self.examples_from,
            "examples_sha256": self.examples_sha256,
            "form": self.prompt.wording.form,
            "prompt": self.prompt.wording.text,
            "prompt_by": self.prompt.text_by,
            "max_tokens": self.max_tokens,
            "stop": list(self.prompt.stop),
            "setting_from": self.prompt.source,
            "extraction": self.prompt.extraction,
        }


@dataclass(frozen=True, kw_only=True)
class AskedTask:
    """A task's problems, the models' inputs for them, and the temperature that the task itself asks for."""

    problem_set: ProblemSet
    inputs: TaskInputs
    temperature: float = 0.0

    @property
    def task(self) -> Task:
        return self.problem_set.task

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.problem_set.problems

    @property
    def record(self) -> dict[str, Any]:
        """Its part of a report."""
        return {
            "rule": self.task.grader.rule,
            "source": self.problem_set.source,
            "n": len(self.problems),
            "sha256": self.problem_set.sha256,
            **self.inputs.record,
        }


def ask(problem_set: ProblemSet, recipe: Recipe, *, examples: str | None, max_tokens: int | None) -> TaskInputs:
    """The problems as `recipe` asks them; `max_tokens` takes the place of the recipe's limit.

    Raises `ValueError` if the recipe lacks the task, or if the examples are missing, malformed, too few or not wanted.
    """
    prompt = recipe.task_prompt(problem_set.task.name)
    examples_of_task = examples_of(problem_set.task, recipe, examples)
    examples_of_problem = choose_examples(examples_of_task, count=prompt.num_examples, choice=prompt.choice)
    inputs = tuple(
        problem.prompt if problem_set.task.asks_calls else prompt_content(prompt.wording, problem, examples_before)
        for problem, examples_before in zip(problem_set.problems, examples_of_problem, strict=False)
    )
    return TaskInputs(
        prompt=prompt,
        inputs=inputs,
        max_tokens=prompt.max_tokens if max_tokens is None else max_tokens,
        may_shorten=max_tokens is None,
        examples_from=examples,
        examples_sha256=hashlib.sha256(
            json.dumps([asdict(example) for example in examples_of_task]).encode()
        ).hexdigest()
        if examples_of_task
        else None,
    )


def examples_of(task: Task, recipe: Recipe, path: str | None) -> list[FewShotExample]:
    """The examples of the user's file, at least as many as the recipe shows. Raises as `ask` does."""
    num_examples = recipe.task_prompt(task.name).num_examples
    if (path is None) != (num_examples == 0):
        raise ValueError(
            f"recipe '{recipe.name}' shows {num_examples} solved problems before each of {task.name}; "
            + ("none are wanted" if path else f"name their file: --examples {task.name}=PATH")
        )
    examples = load_examples(task, path) if path else []
    if len(examples) < num_examples:
        raise ValueError(f"{path}: {num_examples} examples are wanted and the file holds {len(examples)}")
    return examples


def check_positions(name: str, positions: int, tasks: Sequence[AskedTask]) -> list[str]:
    """A note for each task whose answers a model must shorten; `ValueError` for a limit of the user's own that the
    model cannot hold."""
    notes = []
    for task in tasks:
        max_tokens = task.inputs.max_tokens
        if max_tokens < positions:
            continue
        if not task.inputs.may_shorten:
            raise ValueError(
                f"--max-tokens {max_tokens} cannot be honoured: model '{name}' holds {positions} positions, "
                "prompt and answer together"
            )
        notes.append(
            f"model '{name}' holds {positions} positions, prompt and answer together: an answer of {task.name} gets "
            f"the positions that its prompt leaves, not the recipe's {max_tokens} tokens"
        )
    return notes
