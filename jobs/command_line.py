"""What all commands share: options derived from dataclasses, one look, one meaning of exit codes.

A job is a function and its `main = command(function)`. A parameter of the function is an option by its annotation
(`mbd_core.options.Option`), or a dataclass whose fields are options:

    def run(engine: EngineConfig, *, out: Annotated[Path, Option("Folder to write.", OUTPUT)]) -> None: ...

`Annotated[EngineConfig, Fields("max_rows", "num_pages")]` takes some of the fields alone; `Changes` takes those that
were given, for a configuration that is found later. A parameter's default gives a dataclass's fields other defaults.
A parameter that is a `CommandText` is no option: it gets the command itself. Typer is named in this module alone.

Exit codes: 0 done, 1 it failed, 2 bad input, in one sentence on stderr and before any work begins.
"""

import importlib
import importlib.metadata
import inspect
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.exceptions import TyperException
from typer.main import get_command

from mbd_core.json_text import merge_paths
from mbd_core.options import (
    DATA,
    DECODING,
    ENGINE,
    LISTS,
    MODEL,
    OUTPUT,
    PANELS,
    Option,
    OptionField,
    changes_of,
    flag,
    is_json,
    options_of,
    plain_type,
    split,
    value_of,
)
from mbd_core.proxies import keep_direct

ModelName = Annotated[str, Option("A shipped model's name, or a model folder.", MODEL, flag="--model")]
Seed = Annotated[int, Option("Of whatever is drawn.", DATA, at_least=0)]
OwnThreads = Annotated[
    int | None, Option("Torch's threads (default: torch's own)", ENGINE, flag="--threads", at_least=1)
]
MaxTokens = Annotated[int, Option("Tokens of an answer, at most.", DECODING, at_least=1)]
OutFolder = Annotated[Path, Option("Folder to write.", OUTPUT, flag="--out", metavar="DIR")]
Overwrite = Annotated[bool, Option("Replace a folder that this command wrote before.", OUTPUT, flag="--overwrite")]
JsonFile = Annotated[Path | None, Option("Also write the rows there.", OUTPUT, flag="--json", metavar="FILE")]
IsolationText = Annotated[
    Literal["any", "required"],
    Option(
        "What must contain programs; required: bubblewrap or Landlock, or nothing is graded.",
        ENGINE,
        flag="--isolation",
    ),
]


class CommandText(str):
    """The command as it was given, for reports."""


class Fields:
    """Beside a dataclass in `Annotated`: the fields that a command takes, by name; the others keep their defaults."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Changes(Fields):
    """In `Annotated[dict[str, Any], ...]`: fields of a dataclass of which a command takes those that were given, by
    name, or without names all fields of it and of the dataclasses that it holds, as `mbd_core.options.changed` takes
    them."""

    def __init__(self, kind: type, *names: str) -> None:
        super().__init__(*names)
        self.kind = kind


METAVARS = {int: "N", float: "X"}  # of changed fields, whose many options have one narrow column of values
COMMAND = "_command"  # among the values of options: the command itself


class Command(TyperCommand):
    """A command whose help has one column of names: a switch's second name stands behind its text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            if isinstance(option, TyperOption) and option.secondary_opts:
                option.help = f"{option.help} Or {', '.join(option.secondary_opts)}"
                option.secondary_opts = []
        super().format_help(ctx, formatter)


class Main:
    """A job's entry: the command line, by default the process's own, to the exit code.

    A `ValueError` is bad input (2), a `RuntimeError` or an `OSError` a failure (1); each is one sentence. Others are
    defects of ours and keep their traceback.
    """

    def __init__(self, derive: Callable[[], Any], called: str) -> None:
        """`derive` makes Typer's command of the options; `called` is how a user calls it."""
        self._derive, self._called = derive, called

    @cached_property
    def command(self) -> TyperCommand | TyperGroup:
        """Typer's command."""
        derived = self._derive()
        assert isinstance(derived, TyperCommand | TyperGroup)
        return derived

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        arguments = sys.argv[1:] if argv is None else list(argv)
        line = f"{self._called} {shlex.join(arguments)}".strip()
        keep_direct()
        try:
            code = self.command.main(arguments, prog_name=self._called, standalone_mode=False, obj=line)
        except TyperException as error:
            return self._failed(arguments, f"{error.format_message()} (see --help)", 2)
        except ValueError as error:
            return self._failed(arguments, error, 2)
        except (RuntimeError, OSError) as error:
            return self._failed(arguments, error, 1)
        return int(code or 0)

    def _failed(self, arguments: Sequence[str], sentence: object, code: int) -> int:
        """Print the sentence behind the command's name, or the sub-command's; the exit code."""
        name = Path(self._called.rpartition(" ")[2]).stem
        if arguments and isinstance(self.command, TyperGroup) and arguments[0] in self.command.commands:
            name = arguments[0]
        print(f"{name}: {sentence}", file=sys.stderr)
        return code


def command(run: Callable[..., Any], shown: str | None = None, *, epilog: str | None = None) -> Main:
    """The `main(argv=None) -> exit code` of a job's function, which returns `None` or an exit code.

    `shown` is how a user calls it (default: `python jobs/NAME.py`). `epilog` stands below the options.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(cls=Command, help=_help(run), epilog=epilog)(_typer_function(run))
    name = run.__module__.rpartition(".")[2]
    name = Path(sys.argv[0]).stem if name == "__main__" else name
    return Main(lambda: get_command(app), shown or f"python jobs/{name}.py")


@dataclass(frozen=True)
class _Part:
    """A parameter of a job's function: its options on the command line, and its value from theirs."""

    options: list[OptionField]
    value: Callable[[Mapping[str, Any]], Any]


def command_options(run: Callable[..., Any]) -> list[OptionField]:
    """The options of a job's function."""
    options = [option for part in _parts(run).values() for option in part.options]
    names = [option.name for option in options]
    assert len({*names}) == len(names), f"two options have the same name: {sorted(names)}"
    return options


def by_panel(options: Iterable[OptionField]) -> list[OptionField]:
    """Options in the order of the panels of --help; first those that have none."""
    return sorted(options, key=lambda item: PANELS.index(item.option.panel) if item.option.panel else -1)


def _typer_function(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function as Typer takes it: each option is a parameter, and the dataclasses are built of their values."""
    parts = _parts(run)

    def call(_context: typer.Context, **arguments: Any) -> Any:
        arguments[COMMAND] = _context.obj
        return run(**{name: part.value(arguments) for name, part in parts.items()})

    context = inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *map(_typer_parameter, by_panel(command_options(run)))]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call


def _parts(run: Callable[..., Any]) -> dict[str, _Part]:
    hints = typing.get_type_hints(run, include_extras=True)
    parts = {}
    for name, parameter in inspect.signature(run).parameters.items():
        kind, option = split(hints[name])
        default = MISSING if parameter.default is parameter.empty else parameter.default
        selection = next((item for item in getattr(hints[name], "__metadata__", ()) if isinstance(item, Fields)), None)
        if kind is CommandText:
            parts[name] = _Part([], lambda arguments: CommandText(arguments[COMMAND]))
        elif isinstance(selection, Changes):
            parts[name] = _changes(selection)
        elif option is not None:
            parts[name] = _single(OptionField(name=name, hint=kind, option=option, default=default))
        elif is_dataclass(kind):
            parts[name] = part = _of_dataclass(typing.cast(type, kind), selection, default)
            assert selection is None or {*selection.names} <= {item.name for item in part.options}, selection.names
        else:
            raise TypeError(f"{run.__name__}: the parameter {name} has no option")
    return parts


def _single(item: OptionField) -> _Part:
    return _Part([item], lambda arguments: value_of(item, arguments[_parameter_name(item)]))


def _of_dataclass(kind: type, selection: Fields | None, defaults: Any) -> _Part:
    """The options of a dataclass and of those that it holds; `defaults` is an instance with the defaults, if any."""
    parts: dict[str, _Part] = {}
    for field in options_of(kind):
        item = field if defaults is MISSING else replace(field, default=getattr(defaults, field.name))
        if item.option.flag is False:
            continue
        if is_dataclass(item.hint):
            parts[item.name] = _of_dataclass(typing.cast(type, item.hint), selection, item.default)
        elif selection is None or item.name in selection.names:
            parts[item.name] = _single(item)

    def value(arguments: Mapping[str, Any]) -> Any:
        values = {name: part.value(arguments) for name, part in parts.items()}
        return kind(**values) if defaults is MISSING else replace(defaults, **values)

    return _Part([item for part in parts.values() for item in part.options], value)


def _changes(selection: Changes) -> _Part:
    """The given ones of a dataclass's fields; none has a default."""
    changes = {item.name: item for item in changes_of(selection.kind)}
    items = [
        replace(item, option=replace(item.option, metavar=item.option.metavar or METAVARS.get(plain_type(item.hint))))
        for item in (map(changes.__getitem__, selection.names) if selection.names else changes.values())
    ]

    def value(arguments: Mapping[str, Any]) -> dict[str, Any]:
        stated = {item: arguments[_parameter_name(item)] for item in items}
        values = {item.name: value_of(item, text) for item, text in stated.items() if text not in (None, [])}
        return merge_paths({}, values)

    return _Part(items, value)


def _parameter_name(item: OptionField) -> str:
    return item.name.replace(".", "__")


def _typer_parameter(item: OptionField) -> inspect.Parameter:
    """An option as Typer declares it."""
    option, kind = item.option, plain_type(item.hint)
    default: Any = inspect.Parameter.empty if item.default is MISSING else item.default
    if is_json(item.hint):
        kind, default = str, None
    elif typing.get_origin(kind) in LISTS:
        (each,) = {*typing.get_args(kind)} - {...}
        kind = str if option.separator else list[each]  # type: ignore[valid-type]
        if item.default is not MISSING:
            default = (option.separator.join(map(str, default or ())) if option.separator else default) or None
    is_number = kind in (int, float)
    settings: dict[str, Any] = {
        "help": option.help if option.above is None else f"{option.help} (above {option.above:g})",
        "metavar": item.metavar,
        "min": option.at_least if is_number else None,
        "max": option.at_most if is_number else None,
        "show_default": option.default or True,
        "rich_help_panel": option.panel,
    }
    info = typer.Argument(**settings) if option.positional else typer.Option(flag(item), **settings)
    annotation: Any = Annotated[kind | None if default is None else kind, info]
    return inspect.Parameter(
        _parameter_name(item), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


class CommandGroup(TyperGroup):
    """Sub-commands, each imported when it is called, completed, or asked for its help."""

    modules: Mapping[str, tuple[str, str]] = {}

    def __init__(self, **attributes: Any) -> None:
        stubs = {name: TyperCommand(name, help=text) for name, (_, text) in self.modules.items()}
        super().__init__(**{**attributes, "commands": stubs, "no_args_is_help": False})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ([] if ctx.resilient_parsing else ["--help"]))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The named command; `ValueError` for a name that is none, with those that are."""
        name, *rest = args
        if name in self.modules:
            return name, sub_command(*self.modules[name][0].split(":")), rest
        if ctx.resilient_parsing:
            return None, None, rest
        raise ValueError(f"there is no {name}; the names are {', '.join(self.modules)}")


def sub_command(module: str, entry: str = "main") -> TyperCommand | TyperGroup:
    """The command of a job's module; `ValueError` where its package is not installed."""
    try:
        job = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ValueError(
            f"{error.name} is a part of the repository that is not installed: run the command in its folder"
        ) from None
    derived = getattr(job, entry).command
    assert isinstance(derived, TyperCommand | TyperGroup)
    return derived


def sub_commands(
    called: str,
    modules: Mapping[str, tuple[str, str]],
    *,
    about: str | None = None,
    distribution: str | None = None,
) -> Main:
    """`CALLED NAME ...`: calls what `modules` has for NAME, beside a sentence on what it does.

    That is the `Main` named `main` in a module, or with "MODULE:ENTRY" another one. `about` stands above the list of
    names. The command of a `distribution` has --version, and is completed by shells.
    """

    class Named(CommandGroup):
        pass

    def print_version(version: bool) -> None:
        if version:
            print(importlib.metadata.version(str(distribution)))
            raise typer.Exit

    def options() -> None:
        """None stand before the name."""

    def options_of_distribution(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Typer calls back for the version."""

    Named.modules = modules
    app = typer.Typer(
        cls=Named, add_completion=bool(distribution), pretty_exceptions_enable=False, rich_markup_mode="rich"
    )
    callback = options_of_distribution if distribution else options
    app.callback(help=about, subcommand_metavar="NAME ...")(callback)
    return Main(lambda: get_command(app), called)


class _GroupWithDefault(TyperGroup):
    """Sub-commands, of which the first is meant where none is named."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args and args[0] in self.commands:
            return super().make_context(info_name, args, parent, **extra)
        default = next(iter(self.commands.values()))
        return default.make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


def with_default(called: str, mains: Mapping[str, Main]) -> Main:
    """`CALLED NAME ...` for the `mains` by name; without a name it is the first of them."""
    return Main(lambda: _GroupWithDefault(commands={name: main.command for name, main in mains.items()}), called)


def _help(run: Callable[..., Any]) -> str:
    """The docstring, each paragraph on one line, so that the terminal breaks it."""
    return re.sub(r"(?<!\n)\n(?=\w)", " ", inspect.cleandoc(run.__doc__ or ""))
