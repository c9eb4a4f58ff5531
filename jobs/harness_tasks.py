"""Write a recipe's tasks as task files of lm-evaluation-harness, and print how to run them."""

import shlex
import sys

from jobs.command_line import OutFolder, Overwrite
from mbd_core.command_line import command
from mbd_core.evaluation.sweep.options import TaskOptions
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.files import check_target_folder, folder_beside

KIND = "harness tasks"


def run(options: TaskOptions, *, out: OutFolder, overwrite: Overwrite = False) -> None:
    """Write task files for lm-evaluation-harness, with a recipe's prompts and this project's graders.

    python jobs/harness_tasks.py --recipe d2f-llada --tasks gsm8k --data gsm8k/test.jsonl --examples gsm8k/train.jsonl
    --out out/tasks

    It prints the commands that run them.
    """
    from mbd_core.evaluation.sweep.loading import task_files
    from mbd_core.evaluation.tasks.recipes import find_recipe
    from mbd_core.harness.task_files import write_task_files

    check_target_folder(out, KIND, overwrite=overwrite)
    recipe = find_recipe(options.recipe)
    files = task_files(options.data, options.tasks, option="--data")
    examples = task_files(options.examples, options.tasks, option="--examples")
    problem_sets = [load_problems(find_task(name), data=files.get(name)) for name in options.tasks]
    with folder_beside(out, KIND, overwrite=overwrite) as folder:
        flags = write_task_files(folder, recipe, problem_sets, examples=examples, home=out.resolve())
    for task_flags in dict.fromkeys(flags.values()):
        names = ",".join(name for name in flags if flags[name] == task_flags)
        command_line = "mbd-lm-eval --model mbd --model_args pretrained=DIR --include_path"
        print(f"{command_line} {shlex.quote(str(out))} --tasks {names} {task_flags}".strip())


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
