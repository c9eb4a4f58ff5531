"""Options that several jobs have, and commands with sub-commands.

A single command is in `mbd_core/command_line.py`.
"""

import importlib
import importlib.metadata
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from mbd_core.command_line import Main
from mbd_core.fields import DATA, DECODING, ENGINE, MODEL, OUTPUT, Flag, Ge

ModelName = Annotated[str, Flag("A shipped model's name, or a model folder.", MODEL, name="--model")]
Seed = Annotated[int, Ge(0), Flag("Random seed.", DATA)]
OwnThreads = Annotated[int | None, Ge(1), Flag("Torch's threads (default: torch's own)", ENGINE, name="--threads")]
MaxTokens = Annotated[int, Ge(1), Flag("Tokens of an answer, at most.", DECODING)]
OutFolder = Annotated[Path, Flag("Folder to write.", OUTPUT, name="--out", metavar="DIR")]
Overwrite = Annotated[bool, Flag("Replace a folder that this command wrote before.", OUTPUT, name="--overwrite")]
JsonFile = Annotated[Path | None, Flag("Also write the rows to this file.", OUTPUT, name="--json", metavar="FILE")]


class CommandGroup(TyperGroup):
    """Sub-commands, each imported when it is called, when a shell completes its options, or for its help."""

    modules: Mapping[str, tuple[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        stubs = {name: TyperCommand(name, help=text) for name, (_, text) in self.modules.items()}
        super().__init__(**{**attributes, "commands": stubs, "no_args_is_help": False})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ([] if ctx.resilient_parsing else ["--help"]))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The named command. Raises `ValueError`, which lists the known names, for an unknown one."""
        name, *rest = args
        if name in self.modules:
            return name, sub_command(*self.modules[name][0].split(":")), rest
        if ctx.resilient_parsing:
            return None, None, rest
        raise ValueError(f"there is no {name}; the names are {', '.join(self.modules)}")


def sub_command(module: str, entry: str = "main") -> TyperCommand | TyperGroup:
    """The command of a job's module. Raises `ValueError` if the module's package is not installed."""
    try:
        job = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ValueError(
            f"{error.name} is not in the installed package: run the command in the repository's folder"
        ) from None
    main: Main = getattr(job, entry)
    return main.command


def sub_commands(
    called: str,
    modules: Mapping[str, tuple[str, str]],
    *,
    about: str | None = None,
    distribution: str | None = None,
) -> Main:
    """A command `CALLED NAME ...` that runs the sub-command NAME of `modules`.

    `modules` maps each name to a pair: MODULE or MODULE:ENTRY (the default entry is `main`), and one line of help.
    `about` stands above the list of names. With a `distribution` the command has --version and completion in shells.
    """

    def print_version(version: bool) -> None:
        if version:
            print(importlib.metadata.version(str(distribution)))
            raise typer.Exit

    def options() -> None:
        """No option stands before NAME."""

    def options_of_distribution(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
        ] = False,
    ) -> None:
        """`print_version` handles --version."""

    group = type("Named", (CommandGroup,), {"modules": modules})
    app = typer.Typer(add_completion=bool(distribution), pretty_exceptions_enable=False, rich_markup_mode="rich")
    callback = options_of_distribution if distribution else options
    app.callback(cls=group, help=about, subcommand_metavar="NAME ...")(callback)
    return Main(lambda: typing.cast(CommandGroup, get_command(app)), called)


class _GroupWithDefault(TyperGroup):
    """Sub-commands; without a name the first one runs."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args and args[0] in self.commands:
            return super().make_context(info_name, args, parent, **extra)
        default = next(iter(self.commands.values()))
        return default.make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


def with_default(called: str, mains: Mapping[str, Main]) -> Main:
    """A command `CALLED NAME ...` that runs one of `mains`; without NAME it runs the first."""
    return Main(lambda: _GroupWithDefault(commands={name: main.command for name, main in mains.items()}), called)
