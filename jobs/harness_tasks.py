"""Write a recipe's tasks as task files of lm-evaluation-harness: the options, and the command that runs them."""

import sys
from typing import Annotated

import typer

from jobs.command_line import DATA, OutFolder, Overwrite, command, names
from jobs.task_options import ExampleFiles, RecipeName, TaskFiles
from mbd_core.evaluation.tasks.benchmarks import TASKS, find_task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.evaluation.tasks.recipes import OWN
from mbd_core.files import check_target_folder, folder_beside

KIND = "harness tasks"

TaskNames = Annotated[
    str, typer.Option("--tasks", metavar="NAME,...", help=f"Tasks: {', '.join(TASKS)}.", rich_help_panel=DATA)
]


def run(
    tasks: TaskNames,
    out: OutFolder,
    recipe: RecipeName = OWN.name,
    data: TaskFiles = None,
    examples: ExampleFiles = None,
    overwrite: Overwrite = False,
) -> None:
    """Write task files for lm-evaluation-harness, which ask as a recipe asks and are graded by this project's graders.

    python jobs/harness_tasks.py --recipe d2f-llada --tasks gsm8k --data gsm8k/test.jsonl --examples gsm8k/train.jsonl
    --out out/tasks

    It prints the command that runs them.
    """
    from mbd_core.evaluation.sweep.plan import task_files
    from mbd_core.evaluation.tasks.recipes import find_recipe
    from mbd_core.harness.task_files import write_task_files

    check_target_folder(out, KIND, overwrite=overwrite)
    found, task_names = find_recipe(recipe), names(tasks, "--tasks")
    files = task_files(data or (), task_names, option="--data")
    shown = task_files(examples or (), task_names, option="--examples")
    problem_sets = [load_problems(find_task(name), data=files.get(name)) for name in task_names]
    with folder_beside(out, KIND, overwrite=overwrite) as folder:
        flags = write_task_files(folder, found, problem_sets, examples=shown, home=out.resolve())
    for options in dict.fromkeys(flags.values()):
        some = ",".join(name for name in flags if flags[name] == options)
        command_line = f"mbd-lm-eval --model mbd --model_args pretrained=DIR --include_path {out} --tasks {some}"
        print(f"{command_line} {options}".strip())


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
