"""What all commands share: one look, one set of words, one meaning of exit codes.

A job is a function with annotated options (Typer) and its `main = command(function)`. Exit codes: 0 done, 1 it failed,
2 bad input, in one sentence on stderr and before any work begins.
"""

import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import typer
from typer.core import TyperCommand, TyperOption
from typer.exceptions import TyperException
from typer.main import get_command

from mbd_core.json_text import parse_json

MODEL, DATA, DECODING, ENGINE, CLUSTER, OUTPUT = (
    "What runs",
    "Data",
    "Decoding",
    "Engine",
    "Cluster",
    "Output",
)  # the panels of --help, in this order

ModelName = Annotated[
    str, typer.Option("--model", help="A shipped model's name, or a model folder.", rich_help_panel=MODEL)
]
Seed = Annotated[int, typer.Option(help="Of whatever is drawn.", min=0, rich_help_panel=DATA)]
Threads = Annotated[int, typer.Option(help="Torch's threads, each rank's.", min=1, rich_help_panel=ENGINE)]
OwnThreads = Annotated[
    int | None, typer.Option("--threads", help="Torch's threads (default: torch's own)", min=1, rich_help_panel=ENGINE)
]
MaxTokens = Annotated[int, typer.Option(help="Tokens of an answer, at most.", min=1, rich_help_panel=DECODING)]
OutFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write.", rich_help_panel=OUTPUT)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a folder that this command wrote before.", rich_help_panel=OUTPUT)
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the rows there.", rich_help_panel=OUTPUT)
]
IsolationText = Annotated[
    Literal["any", "required"],
    typer.Option(
        "--isolation",
        help="What must contain programs; required: bubblewrap or Landlock, or nothing is graded.",
        rich_help_panel=ENGINE,
    ),
]
MaxRows = Annotated[int, typer.Option(help="Sequences decoded at once.", min=1, rich_help_panel=ENGINE)]
NumPages = Annotated[
    int | None,
    typer.Option(help="Pages of KV memory, each engine's (default: as many as fit).", min=2, rich_help_panel=ENGINE),
]
KvMemoryFraction = Annotated[
    float,
    typer.Option(
        help="Share of a device's memory for an engine, where --num-pages is not given. Engines on CPUs divide it.",
        rich_help_panel=ENGINE,
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        help="Ranks that the model is cut among: GPUs of a node, or processes without GPUs.",
        min=1,
        rich_help_panel=CLUSTER,
    ),
]


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
    app.command(cls=Command, help=_help(run), epilog=epilog)(run)
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


def json_object(text: str, option: str) -> dict[str, Any]:
    """A JSON object that was given as an option; `ValueError` if it is none."""
    value = parse_json(text, f"{option} {text!r}")
    if not isinstance(value, dict):
        raise ValueError(f"{option} {text!r} must be a JSON object")
    return value


def names(text: str, option: str) -> list[str]:
    """A comma-separated list without repetitions; `ValueError` if it is empty."""
    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise ValueError(f"{option} names nothing; give at least one, separated by commas")
    return found


def numbers(text: str, option: str) -> list[int]:
    """A comma-separated list of whole numbers of at least 1; `ValueError` names the one that is not."""
    for name in names(text, option):
        if not name.isdecimal() or int(name) < 1:
            raise ValueError(f"{option} {name} must be a whole number of at least 1")
    return [int(name) for name in names(text, option)]
