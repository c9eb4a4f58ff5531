"""What all commands share: options derived from dataclasses, one look, one meaning of exit codes.

A job is a function and its `main = command(function)`. A parameter of the function is an option by its annotation
(`mbd_core.options.Option`), or a dataclass whose fields are options:

    def run(engine: EngineConfig, *, out: Annotated[Path, Option("Folder to write.", OUTPUT)]) -> None: ...

`Annotated[EngineConfig, Fields("max_rows", "num_pages")]` takes some of the fields alone; `Changes` takes those that
were given, for a configuration that is found later. A parameter's default gives a dataclass's fields other defaults.

Exit codes: 0 done, 1 it failed, 2 bad input, in one sentence on stderr and before any work begins.
"""

import importlib
import inspect
import re
import shlex
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import typer
from typer.core import TyperCommand, TyperOption
from typer.exceptions import TyperException
from typer.main import get_command

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
    nested,
    options_of,
    plain_type,
    split,
    value_of,
)

ModelName = Annotated[str, Option("A shipped model's name, or a model folder.", MODEL, flag="--model")]
Seed = Annotated[int, Option("Of whatever is drawn.", DATA, at_least=0)]
Threads = Annotated[int, Option("Torch's threads, each rank's.", ENGINE, at_least=1)]
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
MaxRows = Annotated[int, Option("Sequences decoded at once.", ENGINE, at_least=1)]
NumPages = Annotated[
    int | None, Option("Pages of KV memory, each engine's (default: as many as fit).", ENGINE, at_least=2)
]


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


class Command(TyperCommand):
    """A command whose help has one column of names: a switch's second name stands behind its text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            if isinstance(option, TyperOption) and option.secondary_opts:
                option.help = f"{option.help} Or {', '.join(option.secondary_opts)}"
                option.secondary_opts = []
        super().format_help(ctx, formatter)


class Main(Protocol):
    """A job's entry: the command line, by default the process's own, to the exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def command(run: Callable[..., Any], shown: str | None = None, *, epilog: str | None = None) -> Main:
    """The job's `main(argv=None) -> exit code`; `shown` is how a user calls it (default: `python jobs/NAME.py`).

    A `ValueError` is bad input (2), a `RuntimeError` or an `OSError` a failure (1); each is one sentence. Others are
    defects of ours and keep their traceback. `run` returns `None` or an exit code. `epilog` stands below the options.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(cls=Command, help=_help(run), epilog=epilog)(_derived(run))
    name = run.__module__.rpartition(".")[2]
    name = Path(sys.argv[0]).stem if name == "__main__" else name
    name = shown.rpartition(" ")[2] if shown else name
    called = shown or f"python jobs/{name}.py"

    def line(arguments: Sequence[str]) -> str:
        return f"{called} {shlex.join(arguments)}".strip()

    def main(argv: Sequence[str] | None = None) -> int:
        arguments = sys.argv[1:] if argv is None else list(argv)
        try:
            code = get_command(app).main(arguments, prog_name=called, standalone_mode=False, obj=line(arguments))
        except TyperException as error:
            print(f"{name}: {error.format_message()} (see --help)", file=sys.stderr)
            return 2
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        except (RuntimeError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        return int(code or 0)

    return main


@dataclass(frozen=True)
class _Part:
    """A parameter of a job's function: its options on the command line, and its value from theirs."""

    options: list[OptionField]
    value: Callable[[Mapping[str, Any]], Any]


def command_options(run: Callable[..., Any]) -> list[OptionField]:
    """The options of a job's function."""
    found = [option for part in _parts(run).values() for option in part.options]
    names = [option.name for option in found]
    assert len({*names}) == len(names), f"two options have the same name: {sorted(names)}"
    return found


def _derived(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function as Typer takes it: each option is a parameter, and the dataclasses are built of their values.

    Parameters that are annotated for Typer itself, as its context, are left as they are.
    """
    parts, hints = _parts(run), typing.get_type_hints(run, include_extras=True)
    others = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(run).parameters.items()
        if name not in parts
    ]

    def call(**given: Any) -> Any:
        values = {name: part.value(given) for name, part in parts.items()}
        return run(**{parameter.name: given[parameter.name] for parameter in others}, **values)

    parameters = [*others, *map(_typer_parameter, command_options(run))]
    parameters.sort(key=_panel_number)
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call


def _panel_number(parameter: inspect.Parameter) -> int:
    """Where the panel of an option as Typer declares it stands in --help; -1 for none."""
    about = getattr(parameter.annotation, "__metadata__", (None,))[0]
    panel = getattr(about, "rich_help_panel", None)
    return PANELS.index(panel) if panel in PANELS else -1


def _parts(run: Callable[..., Any]) -> dict[str, _Part]:
    hints = typing.get_type_hints(run, include_extras=True)
    parts = {}
    for name, parameter in inspect.signature(run).parameters.items():
        kind, option = split(hints[name])
        default = MISSING if parameter.default is parameter.empty else parameter.default
        chosen = next((item for item in getattr(hints[name], "__metadata__", ()) if isinstance(item, Fields)), None)
        if isinstance(chosen, Changes):
            parts[name] = _changes(chosen)
        elif option is not None:
            parts[name] = _single(OptionField(name=name, hint=kind, option=option, default=default))
        elif is_dataclass(kind):
            parts[name] = part = _of_dataclass(typing.cast(type, kind), chosen, default)
            assert chosen is None or {*chosen.names} <= {item.name for item in part.options}, chosen.names
    return parts


def _single(item: OptionField) -> _Part:
    return _Part([item], lambda given: value_of(item, given[_parameter_name(item)]))


def _of_dataclass(kind: type, chosen: Fields | None, defaults: Any) -> _Part:
    """The options of a dataclass and of those that it holds; `defaults` is an instance with the defaults, if any."""
    parts: dict[str, _Part] = {}
    for field in options_of(kind):
        item = field if defaults is MISSING else replace(field, default=getattr(defaults, field.name))
        if item.option.flag is False:
            continue
        if is_dataclass(item.hint):
            parts[item.name] = _of_dataclass(typing.cast(type, item.hint), chosen, item.default)
        elif chosen is None or item.name in chosen.names:
            parts[item.name] = _single(item)

    def value(given: Mapping[str, Any]) -> Any:
        values = {name: part.value(given) for name, part in parts.items()}
        return kind(**values) if defaults is MISSING else replace(defaults, **values)

    return _Part([item for part in parts.values() for item in part.options], value)


def _changes(chosen: Changes) -> _Part:
    """The given ones of a dataclass's fields; none has a default."""
    known = {item.name: item for item in changes_of(chosen.kind)}
    items = [
        replace(item, option=replace(item.option, metavar=item.option.metavar or METAVARS.get(plain_type(item.hint))))
        for item in (map(known.__getitem__, chosen.names) if chosen.names else known.values())
    ]

    def value(given: Mapping[str, Any]) -> dict[str, Any]:
        stated = {item: given[_parameter_name(item)] for item in items}
        return nested({item.name: value_of(item, text) for item, text in stated.items() if text not in (None, [])})

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
    about: dict[str, Any] = {
        "help": option.help if option.above is None else f"{option.help} (above {option.above:g})",
        "metavar": option.metavar,
        "min": option.at_least if is_number else None,
        "max": option.at_most if is_number else None,
        "show_default": option.default or True,
        "rich_help_panel": option.panel,
    }
    info = typer.Argument(**about) if option.positional else typer.Option(flag(item), **about)
    annotation: Any = Annotated[kind | None if default is None else kind, info]
    return inspect.Parameter(
        _parameter_name(item), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def sub_commands(package: str, modules: Mapping[str, tuple[str, str]]) -> Main:
    """`python -m PACKAGE NAME ...`: calls what `modules` has for NAME, beside a sentence on what it does.

    That is the `main` of a module, or with "MODULE:ENTRY" another entry; only that module is imported.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
        if name in modules:
            module, _, entry = modules[name][0].partition(":")
            return int(getattr(importlib.import_module(module), entry or "main")(rest))
        if name not in ("--help", "-h"):
            print(f"{package}: there is no {name}; the names are {', '.join(modules)}", file=sys.stderr)
            return 2
        print(f"Usage: python -m {package} NAME [OPTIONS], where NAME is one of\n")
        print("\n".join(f"  {known:<{max(map(len, modules))}}  {text}" for known, (_, text) in modules.items()))
        print(f"\npython -m {package} NAME --help shows the options of one.")
        return 0

    return main


def _help(run: Callable[..., Any]) -> str:
    """The docstring, each paragraph on one line, so that the terminal breaks it."""
    return re.sub(r"(?<!\n)\n(?=\w)", " ", inspect.cleandoc(run.__doc__ or ""))


def command_text(context: typer.Context) -> str:
    """The command as it was given, for reports; a job that takes a `typer.Context` has it."""
    assert isinstance(context.obj, str)
    return context.obj
