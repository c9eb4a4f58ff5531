"""Loads what a sweep's options name: methods, tasks with their prompts, models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mbd_core.checkpoint.folder import ModelFolder, read_folder, with_method
from mbd_core.checkpoint.shipped import SHIPPED, model_folder
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.evaluation.sweep.choice.best_folder import author_defaults
from mbd_core.evaluation.sweep.grid import Grid, Methods, parse_grid, parse_methods
from mbd_core.evaluation.sweep.options import SweepOptions
from mbd_core.evaluation.tasks.asking import AskedTask, ask
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.harness_requests import load_harness_problems
from mbd_core.evaluation.tasks.kinds.harness import HARNESS_PREFIX
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.evaluation.tasks.recipes import Recipe, find_recipe


@dataclass(frozen=True, kw_only=True)
class SweptModel:
    """A model of a sweep.

    place      an argument of `model_folder`
    contents   the model's folder, with the decoding that the model's author recommends
    positions  the longest sequence that the sweep's engine holds, in tokens
    """

    name: str
    place: str
    contents: ModelFolder
    positions: int


@dataclass(frozen=True, kw_only=True)
class SweepInputs:
    """The inputs of a sweep's plan."""

    options: SweepOptions
    sampling: Sampling
    grid: Grid
    methods: Methods
    recipe: Recipe
    tasks: Sequence[AskedTask]
    models: Sequence[SweptModel]


def load_inputs(options: SweepOptions) -> SweepInputs:
    """Read what the options name. Raises `ValueError`, one sentence, for a thing that cannot be read."""
    recipe = find_recipe(options.recipe)
    return SweepInputs(
        options=options,
        sampling=Sampling(temperature=options.temperature, top_p=options.top_p),
        grid=parse_grid(options.grid),
        methods=parse_methods(options.definitions),
        recipe=recipe,
        tasks=[
            *_own_tasks(options, recipe),
            *load_harness_problems(
                [name for name in options.tasks if name.startswith(HARNESS_PREFIX)],
                form=options.form,
                include=options.include_path and str(Path(options.include_path).resolve()),
                limit=options.limit,
                max_tokens=options.max_tokens,
                mc_num=options.mc_num,
                seed=options.seed,
            ),
        ],
        models=[_read_model(name, options) for name in options.models],
    )


def _own_tasks(options: SweepOptions, recipe: Recipe) -> list[AskedTask]:
    tasks = [find_task(name) for name in options.tasks if not name.startswith(HARNESS_PREFIX)]
    names = [task.name for task in tasks]
    files = task_files(options.data, names, option="--data")
    examples = task_files(options.examples, names, option="--examples")
    for name in names:
        recipe.task_prompt(name)  # refused before any problem is read
    problem_sets = [
        load_problems(task, split=options.split, seed=options.seed, limit=options.limit, data=files.get(task.name))
        for task in tasks
    ]
    return [
        AskedTask(
            problem_set=problems,
            inputs=ask(problems, recipe, examples=examples.get(problems.task.name), max_tokens=options.max_tokens),
        )
        for problems in problem_sets
    ]


def _read_model(model: str, options: SweepOptions) -> SweptModel:
    folder = model_folder(model)
    name, contents = folder.resolve().name, read_folder(folder)
    try:
        contents.config.sharded(options.tensor_parallel)
    except ValueError as error:
        raise ValueError(
            f"--tensor-parallel {options.tensor_parallel} cannot be honoured: model '{name}': {error}"
        ) from None
    return SweptModel(
        name=name,
        place=model if folder == SHIPPED / model else str(folder.resolve()),
        contents=replace(contents, defaults=with_method(author_defaults(contents.defaults), contents.config)),
        positions=options.engine.positions(contents.config.max_positions),
    )


def task_files(options: Sequence[str], tasks: Sequence[str], *, option: str) -> dict[str, str]:
    """The path of each task's file, from TASK=PATH, or from a bare PATH if there is one task."""
    files: dict[str, str] = {}
    if options and not tasks:
        raise ValueError(f"{option} {options[0]}: none of the --tasks takes a file; leave {option} out")
    for item in options:
        task, equals, path = item.partition("=")
        if not (equals and task in tasks):
            if equals and "/" not in task:
                find_task(task)
                raise ValueError(f"{option} {item}: the task '{task}' is not among --tasks {','.join(tasks)}")
            if len(tasks) > 1:
                raise ValueError(f"{option} {item}: with several tasks write TASK=PATH")
            task, path = tasks[0], item
        if task in files:
            raise ValueError(f"{option} gives task '{task}' two files: {files[task]} and {path}")
        files[task] = path
    return files
