"""Command lines: a command is a function, whose configurations (`mbd_core/fields.py`) and parameters are its options.

    def run(engine: EngineConfig, *, out: Annotated[Path, Flag("Folder to write.", OUTPUT)]) -> None: ...

    main = command(run)

`Annotated[EngineConfig, Fields("max_rows", "num_pages")]` has options only for these fields. `Changes` passes on the
given fields, for a configuration that is built later. A parameter's default gives a configuration's fields other
defaults. A parameter that is a `CommandText` gets the command itself. With `shown` a command has only these options,
and `--set PATH=VALUE` for every field. Only this file and jobs/command_line.py name Typer.

Exit codes: 0 done, 1 it failed, 2 bad input, in one sentence on stderr and before any work begins, 130 stopped by a
signal, after the command has cleaned up.
"""

import importlib.metadata
import inspect
import io
import logging
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.exceptions import TyperException
from typer.main import get_command

from mbd_core.field_texts import field_at, form_of, item_form, value_of
from mbd_core.fields import OUTPUT, PANELS, Field, Flag, bounds, changed, leaves_of, load
from mbd_core.json_text import merge_paths
from mbd_core.proxies import keep_direct
from mbd_core.stops import any_stop_as_interrupt

NUMBERS = {"integer": "N", "number": "X"}  # what --help shows for a number
EXTRA = re.compile(r"(?P<package>[\w.-]+).*extra == [\"'](?P<extra>[\w-]+)")
WORDS_OF_NONE = re.compile(r" \(default: [^()]*\)")  # in the help of an option whose default is computed
SETTING = Field(
    path="set",
    hint=tuple[str, ...],
    help="Change any field, as train.clip=0.5; docs/reference/options.md lists them.",
    flag=Flag(panel=OUTPUT, metavar="PATH=VALUE"),
    default=(),
)


class CommandText(str):
    """The command as it was given, for reports."""


class Fields:
    """Beside a configuration in `Annotated`: the names of the fields that a command takes. Other fields keep their
    defaults."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Changes(Fields):
    """In `Annotated[dict[str, Any], ...]`: the given fields of a configuration, by path, for
    `mbd_core.fields.changed`. The command has options for the named fields, or for all. `default` are the words for
    the defaults of fields that have none of their own, as "the recipe's"."""

    def __init__(self, kind: type, *names: str, default: str | None = None) -> None:
        super().__init__(*names)
        self.kind, self.default = kind, default


class Command(TyperCommand):
    """A command whose help has one column of names: a switch's second name follows its help text."""

    unshown: Mapping[str, str]
    """The paths of the fields that have no option, by the name that the option would have."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            if isinstance(option, TyperOption) and option.secondary_opts:
                option.help = f"{option.help} Or {', '.join(option.secondary_opts)}"
                option.secondary_opts = []
        super().format_help(ctx, formatter)


@dataclass(frozen=True)
class Main:
    """A command's entry: it takes a command line (default: the process's) and returns the exit code.

    A `ValueError` is bad input (2), an error of `failures` a failure (1); each is one sentence, which only the first
    of torchrun's processes prints. Other errors are defects of ours and keep their traceback.

    derive    makes Typer's command
    called    how a user calls it
    run       the command's function; `None` for a group of commands
    shown     the paths of the fields that are options; `None`: all
    go_on     how a user goes on after a signal, which stderr then says; `None`: nothing of the work is kept
    """

    derive: Callable[[], TyperCommand | TyperGroup]
    called: str
    run: Callable[..., Any] | None = None
    shown: Collection[str] | None = None
    failures: tuple[type[Exception], ...] = (RuntimeError, OSError)
    go_on: str | None = None

    def shows(self, item: Field) -> bool:
        """Whether a field is an option; `--set` changes the other fields."""
        return self.shown is None or item.path in self.shown

    @cached_property
    def options(self) -> list[Field]:
        """The fields that the command takes."""
        return [] if self.run is None else command_options(self.run)

    @cached_property
    def command(self) -> TyperCommand | TyperGroup:
        """Typer's command."""
        return self.derive()

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        arguments = sys.argv[1:] if argv is None else list(argv)
        line = f"{self.called} {shlex.join(arguments)}".strip()
        keep_direct()
        print_every_character()
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home that it cannot write
        try:
            with any_stop_as_interrupt():
                code = self.command.main(arguments, prog_name=self.called, standalone_mode=False, obj=line)
        except TyperException as error:
            unshown = getattr(getattr(getattr(error, "ctx", None), "command", None), "unshown", {})
            path = unshown.get(getattr(error, "option_name", None))
            remedy = "see --help" if path is None else f"say --set {path}=VALUE"
            return self._failed(arguments, f"{error.format_message()} ({remedy})", 2)
        except ValueError as error:
            return self._failed(arguments, error, 2)
        except ModuleNotFoundError as error:
            extra = _extra_of(error.name or "")
            if extra is None:
                raise
            sentence = f"this needs {error.name}, which is not installed: pip install 'mbd-cluster[{extra}]'"
            return self._failed(arguments, sentence, 2)
        except self.failures as error:
            return self._failed(arguments, error, 1)
        return int(code or 0)

    def _failed(self, arguments: Sequence[str], sentence: object, code: int) -> int:
        """Print the name of the command or sub-command, and the sentence. Returns the exit code."""
        is_named = arguments and isinstance(self.command, TyperGroup) and arguments[0] in self.command.commands
        _print_sentence(arguments[0] if is_named else self.called, sentence)
        return code


def _print_sentence(called: str, sentence: object) -> None:
    """Print a command's name, the last word of how it is called, and a sentence; of torchrun's processes the first
    prints."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{Path(called.rpartition(' ')[2]).name.removesuffix('.py')}: {sentence}", file=sys.stderr)


def _extra_of(module: str) -> str | None:
    """The extra of this project that installs a module's package."""
    package = module.partition(".")[0].replace("_", "-")
    with suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("mbd-cluster") or ():
            found = EXTRA.match(requirement)
            if found is not None and found["package"].replace("_", "-") == package and found["extra"] != "dev":
                return found["extra"]
    return None


def print_every_character() -> None:
    """A character that standard output cannot encode, as in an ASCII-only locale, is printed as its escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def command(
    run: Callable[..., Any],
    called: str | None = None,
    *,
    shown: Collection[str] | None = None,
    epilog: str | None = None,
    failures: tuple[type[Exception], ...] = (RuntimeError, OSError),
    go_on: str | None = None,
) -> Main:
    """The `main(argv=None) -> exit code` of a command's function, which returns `None` or an exit code.

    `called` is how a user calls it (default: `python jobs/NAME.py`). `shown` are the paths of the fields that are
    options (default: all). `epilog` stands below the options. `go_on` is said after a signal.
    """

    def derive() -> TyperCommand:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        app.command(cls=Command, help=_help(run), epilog=epilog)(_typer_function(run, main))
        derived = get_command(app)
        assert isinstance(derived, Command) and {*(shown or ())} <= {item.path for item in main.options}, shown
        unshown = (item for item in main.options if not main.shows(item))
        derived.unshown = {name: item.path for item in unshown for name in flag(item).split("/")}
        return derived

    name = run.__module__.rpartition(".")[2]
    name = Path(sys.argv[0]).stem if name == "__main__" else name
    main = Main(derive, called or f"python jobs/{name}.py", run, shown, failures, go_on)
    return main


Given = Mapping[str, Any]
"""The values that a command line gives, by path; the command itself under "" ."""
CommandPart = tuple[list[Field], Callable[[Given], Any]]
"""A parameter of a command's function: its options, and the function that builds its value from the given values."""


def command_options(run: Callable[..., Any]) -> list[Field]:
    """The options of a command's function, and what `--set` takes."""
    options = [option for part, _ in _parts(run).values() for option in part]
    paths = [option.path for option in options]
    assert len({*paths}) == len(paths), f"two options have the same path: {sorted(paths)}"
    return options


def refuse_given(run: Callable[..., Any], where: str, **values: Any) -> None:
    """Raises `ValueError` for an option of a command's function that is not at its default and has no meaning
    `where`, as "without --data"."""
    for item in command_options(run):
        if item.name in values and values[item.name] != item.default:
            raise ValueError(f"{flag(item).partition('/')[0]} has no meaning {where}; leave it out")


def by_panel(options: Iterable[Field]) -> list[Field]:
    """Options in the order of the panels of --help; first the options without a panel."""
    return sorted(options, key=lambda item: PANELS.index(item.flag.panel) if item.flag.panel else -1)


def flag(item: Field) -> str:
    """An option's name. A switch has two names if it is on by default, or may stay unset."""
    if item.flag.name:
        return item.flag.name
    name = item.name.replace("_", "-")
    switches = form_of(item).get("type") == "boolean" and item.default is not False
    return f"--{name}/--no-{name}" if switches else f"--{name}"


def _typer_function(run: Callable[..., Any], main: Main) -> Callable[..., Any]:
    """The function as Typer takes it: each option is a parameter, and configurations are built from the values."""
    parts = _parts(run)
    items = {_parameter_name(item): item for part, _ in parts.values() for item in part}
    paths = {item.path: item for item in items.values()}

    def call(_context: typer.Context, **arguments: Any) -> Any:
        given: dict[str, Any] = {"": _context.obj}
        for text in arguments.pop(SETTING.path, None) or ():
            path, value = _setting(text, paths)
            if path in given:
                raise ValueError(f"--set {text}: {path} is set twice; say it once")
            given[path] = value
        for name, value in arguments.items():
            if _context.get_parameter_source(name).name != "DEFAULT":  # type: ignore[union-attr]
                item = items[name]
                if item.path in given:
                    raise ValueError(f"{flag(item)} and --set {item.path} are both given; say one of them")
                given[item.path] = value_of(item, value, flag(item).partition("/")[0])
        values = {name: build(given) for name, (_, build) in parts.items()}
        try:
            return run(**values)
        except KeyboardInterrupt:
            if main.go_on is not None:
                _print_sentence(str(_context.info_name), f"stopped; {main.go_on}")
            raise

    parameters = [inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += map(_typer_parameter, by_panel(item for item in items.values() if main.shows(item)))
    if main.shown is not None:
        parameters.append(_typer_parameter(SETTING))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call


def _parts(run: Callable[..., Any]) -> dict[str, CommandPart]:
    hints = typing.get_type_hints(run, include_extras=True)
    parameters = inspect.signature(run).parameters.values()
    return {item.name: _part(item.name, hints[item.name], item.default) for item in parameters}


def _part(name: str, hint: Any, default: Any) -> CommandPart:
    """A parameter's options, and how its value is built. A configuration's `default` is an instance, whose values are
    the options' defaults."""
    marks: tuple[Any, ...] = getattr(hint, "__metadata__", ())
    kind = hint.__origin__ if marks else hint
    default = MISSING if default is inspect.Parameter.empty else default
    selection = next((item for item in marks if isinstance(item, Fields)), Fields())
    shown = next((item for item in marks if isinstance(item, Flag)), None)
    if kind is CommandText:
        return [], lambda given: CommandText(given[""])
    if shown is not None:
        bounds = [item for item in marks if item is not shown]
        hint = Annotated[(kind, *bounds)] if bounds else kind
        item = Field(path=name, hint=hint, help=shown.help, flag=shown, default=default)
        return [item], lambda given: given.get(name, default)
    if isinstance(selection, Changes):
        kind = selection.kind
    assert is_dataclass(kind), f"the parameter {name} has no option"
    by_path = {item.path: item for item in leaves_of(typing.cast(type, kind), default)}
    items = [*map(by_path.pop, selection.names or [*by_path])]

    def values(given: Given) -> dict[str, Any]:
        return merge_paths({}, {item.path: given[item.path] for item in items if item.path in given})

    if isinstance(selection, Changes):
        flags = [replace(item.flag, default=item.flag.default or selection.default) for item in items]
        return [replace(item, default=None, flag=each) for item, each in zip(items, flags, strict=True)], values
    return items, lambda given: load(kind, values(given)) if default is MISSING else changed(default, values(given))


def _setting(text: str, items: Mapping[str, Field]) -> tuple[str, Any]:
    """The path and the value of `PATH=VALUE`; `ValueError` for a path that is unknown, and for a refused value."""
    path, equals, given = text.partition("=")
    item = field_at(path, items, f"--set {text}")
    if not equals:
        raise ValueError(f"--set {text}: say its value, as --set {path}=VALUE")
    return path, value_of(item, None if given == "null" else given, f"--set {path}", "=")


def _parameter_name(item: Field) -> str:
    return item.path.replace(".", "__")


def metavar(item: Field) -> str | None:
    """The text that --help shows for the value; `None`: its type."""
    form = form_of(item)
    if item.flag.metavar is not None or item.flag.positional:
        return item.flag.metavar
    if item.flag.commas:
        return f"{NUMBERS.get(item_form(form)['type'], 'NAME')},..."
    return NUMBERS.get(form.get("type", ""))


def _typer_parameter(item: Field) -> inspect.Parameter:
    form, default = form_of(item), item.default
    kind = _python_type(form)
    if form.get("type") == "object":
        default = None
    elif form.get("type") == "array":
        kind = str if item.flag.commas else list[_python_type(item_form(form))]  # type: ignore[misc]
        if default is not MISSING:
            default = (",".join(map(str, default or ())) if item.flag.commas else default) or None
    bounded = bounds(form).removeprefix("of ") if form.get("type") in NUMBERS else ""
    help_text = item.help if default in (None, MISSING) else WORDS_OF_NONE.sub("", item.help)
    settings: dict[str, Any] = {
        "help": f"{help_text} ({bounded})" if bounded else help_text,
        "metavar": metavar(item),
        "show_default": item.flag.default or True,
        "rich_help_panel": item.flag.panel,
    }
    info = typer.Argument(**settings) if item.flag.positional else typer.Option(flag(item), **settings)
    hint: Any = Annotated[kind | None if default is None else kind, info]
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(_parameter_name(item), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _python_type(form: Mapping[str, Any]) -> Any:
    """Typer's type. Typer gets numbers as texts, because Typer's refusals do not name the value."""
    if "enum" in form or "const" in form:
        return Literal[tuple(form.get("enum") or [form["const"]])]
    return bool if form.get("type") == "boolean" else str


def _help(run: Callable[..., Any]) -> str:
    """The docstring, each paragraph on one line, so that the terminal breaks it."""
    return re.sub(r"(?<!\n)\n(?=\w)", " ", inspect.cleandoc(run.__doc__ or ""))
