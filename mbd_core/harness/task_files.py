"""Task files for lm-evaluation-harness (`--include_path`): a recipe's tasks on the user's data.

A task NAME has the files NAME.yaml, NAME.problems.jsonl and, for a few-shot recipe, NAME.examples.jsonl.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mbd_core.batch.rows import PROBLEM_COLUMNS
from mbd_core.evaluation.tasks.asking import examples_of
from mbd_core.evaluation.tasks.problems import ProblemSet
from mbd_core.evaluation.tasks.prompts import FewShotExample
from mbd_core.evaluation.tasks.recipes import Recipe, TaskPrompt
from mbd_core.files import write_text
from mbd_core.harness.scoring import MEASURES, metrics_of, score

COLUMNS = ("task", "asked", "target", *PROBLEM_COLUMNS)
FLAGS = {
    "turn": "--apply_chat_template --fewshot_as_multiturn false",
    "turns": "--apply_chat_template --fewshot_as_multiturn true",
    "plain": "",
}


def task_name(recipe: Recipe, task: str) -> str:
    """The harness's name of a recipe's task."""
    return f"{recipe.name}_{task}"


def write_task_files(
    folder: Path, recipe: Recipe, problem_sets: Sequence[ProblemSet], *, examples: Mapping[str, str], home: Path
) -> dict[str, str]:
    """Writes the files of every task into `folder`. Returns each task's harness flags by its name.

    `home` is the folder's final path; the files use it to name each other. Raises `ValueError` if the recipe lacks a
    task, if a task asks for calls of functions, or if examples are missing, malformed, too few, or given to a task
    that takes none.
    """
    flags: dict[str, str] = {}
    for problem_set in problem_sets:
        task, prompt = problem_set.task, recipe.task_prompt(problem_set.task.name)
        if task.asks_calls:
            raise ValueError(
                f"task '{task.name}' asks for calls of functions, which lm-evaluation-harness does not read out of an "
                "answer: ask it by mbd sweep"
            )
        shots = examples_of(task, recipe, examples.get(task.name))
        name = task_name(recipe, task.name)
        files = {"test": f"{name}.problems.jsonl"}
        write_text(folder / files["test"], _lines(_problem_rows(problem_set, prompt)))
        if shots:
            files["train"] = f"{name}.examples.jsonl"
            write_text(
                folder / files["train"], _lines([_example_row(task.name, prompt, example) for example in shots])
            )
        paths = {split: str(home / file) for split, file in files.items()}
        write_text(folder / f"{name}.yaml", _yaml(name, recipe, problem_set, prompt, paths))
        flags[name] = FLAGS[prompt.wording.form]
    return flags


def _problem_rows(problem_set: ProblemSet, prompt: TaskPrompt) -> list[dict[str, str]]:
    return [
        {
            "task": problem_set.task.name,
            "asked": prompt.wording.text.format(question=problem.text or problem.prompt, tests=problem.tests),
            "target": problem.reference if not problem_set.task.runs_programs else problem.entry_point,
            **{name: getattr(problem, name) for name in PROBLEM_COLUMNS},
        }
        for problem in problem_set.problems
    ]


def _example_row(task: str, prompt: TaskPrompt, example: FewShotExample) -> dict[str, str]:
    """A row with the columns of a problem's row: the splits of a data set must have the same columns."""
    question = prompt.wording.text.format(question=example.question, tests=example.tests)
    target = prompt.wording.answer.format(answer=example.answer)
    return dict.fromkeys(COLUMNS, "") | {"task": task, "asked": question, "target": target}


def _lines(rows: Sequence[Mapping[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _yaml(name: str, recipe: Recipe, problem_set: ProblemSet, prompt: TaskPrompt, files: Mapping[str, str]) -> str:
    """The task as YAML, with each value as JSON, a subset of YAML."""
    wording = prompt.wording
    fields: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "asked",
        "doc_to_target": "target",
        **({"description": wording.system} if wording.system else {}),
        "target_delimiter": wording.joint,
        "fewshot_delimiter": wording.separator,
        "num_fewshot": prompt.num_examples,
        "generation_kwargs": {"until": list(prompt.stop), "max_gen_toks": prompt.max_tokens, "do_sample": False},
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": metric not in ("nfe", "tokens", "cut")}
            for metric in metrics_of(problem_set.task)
        ],
        "metadata": {
            "version": 1.0,
            "recipe": f"{recipe.name} ({recipe.source})",
            "setting_from": prompt.source,
            "prompt_by": prompt.text_by,
            "problems": problem_set.source,
            "problems_sha256": problem_set.sha256,
        },
    }
    if prompt.num_examples:
        fields["training_split"] = fields["fewshot_split"] = "train"
        fields["fewshot_config"] = {"sampler": "first_n" if prompt.choice == "first" else "default"}
    lines = [
        f"# {recipe.name}: {problem_set.task.label}, asked with: mbd-lm-eval {FLAGS[wording.form]} ...",
        f"# {', '.join(MEASURES)}: means over the answers of the model 'mbd'",
        *(f"{key}: {json.dumps(value)}" for key, value in fields.items()),
        f"process_results: !function {score.__module__}.{score.__name__}",
    ]
    return "\n".join(lines) + "\n"
