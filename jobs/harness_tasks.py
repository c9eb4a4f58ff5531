"""Write a recipe's tasks as task files of lm-evaluation-harness: the options, and the command that runs them."""

import sys
from typing import Annotated

import typer

from jobs.command_line import DATA, OutFolder, Overwrite, command, names
from mbd_core.evaluation.evaluation_recipes import OWN, RECIPES, find_recipe
from mbd_core.evaluation.problem_set import load_problems
from mbd_core.evaluation.sweep_plan import task_files
from mbd_core.evaluation.tasks import TASKS, find_task
from mbd_core.files import check_target_folder, folder_beside
from mbd_core.harness.task_files import write_task_files

KIND = "harness tasks"

TaskNames = Annotated[
    str, typer.Option("--tasks", metavar="NAME,...", help=f"Tasks: {', '.join(TASKS)}.", rich_help_panel=DATA)
]
RecipeName = Annotated[
    str,
    typer.Option("--recipe", metavar="NAME", help=f"How tasks are asked: {', '.join(RECIPES)}.", rich_help_panel=DATA),
]
DataFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="TASK=PATH",
        help="Where a task lies: a file of JSON lines, or hub:NAME[:CONFIGURATION[:SPLIT]]; repeatable.",
        rich_help_panel=DATA,
    ),
]
ExampleFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--examples",
        metavar="TASK=PATH",
        help="Solved problems for a few-shot recipe, as the task's train split; repeatable.",
        rich_help_panel=DATA,
    ),
]


def run(
    tasks: TaskNames,
    out: OutFolder,
    recipe: RecipeName = OWN.name,
    data: DataFiles = None,
    examples: ExampleFiles = None,
    overwrite: Overwrite = False,
) -> None:
    """Write task files for lm-evaluation-harness, which ask as a recipe asks and are graded by this project's graders.

    python jobs/harness_tasks.py --recipe d2f-llada --tasks gsm8k --data gsm8k/test.jsonl --examples gsm8k/train.jsonl
    --out out/tasks

    It prints the command that runs them.
    """
    check_target_folder(out, KIND, overwrite=overwrite)
    found, task_names = find_recipe(recipe), names(tasks, "--tasks")
    files = task_files(data or (), task_names, option="--data")
    shown = task_files(examples or (), task_names, option="--examples")
    problem_sets = [load_problems(find_task(name), data=files.get(name)) for name in task_names]
    with folder_beside(out, KIND, overwrite=overwrite) as folder:
        flags = write_task_files(folder, found, problem_sets, examples=shown, home=out.resolve())
    for options in dict.fromkeys(flags.values()):
        some = ",".join(name for name in flags if flags[name] == options)
        print(f"lm_eval --model mbd --model_args pretrained=DIR --include_path {out} --tasks {some} {options}".strip())


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
