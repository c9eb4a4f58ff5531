"""Options of the commands that ask a task's problems: how they are asked, and where they lie."""

from typing import Annotated

import typer

from jobs.command_line import DATA
from mbd_core.evaluation.tasks.recipes import RECIPES

RecipeName = Annotated[
    str,
    typer.Option("--recipe", metavar="NAME", help=f"How tasks are asked: {', '.join(RECIPES)}.", rich_help_panel=DATA),
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
TaskFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="TASK=PATH",
        help="Where a task that is not generated lies: a file of JSON lines, or hub:NAME[:CONFIGURATION[:SPLIT]]. "
        "With one task PATH alone; repeatable.",
        rich_help_panel=DATA,
    ),
]
