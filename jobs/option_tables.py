"""The tables of options in the documents: `python -m jobs.option_tables > docs/reference/options.md`."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import MISSING, is_dataclass, replace
from pathlib import Path

from actors.serving.args import Autoscaling, ModelArgs, ServingArgs
from jobs.__main__ import COMMANDS
from mbd_core.command_line import Main, by_panel, flag, metavar
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.engine.config import EngineConfig
from mbd_core.fields import Field, OpenedBy, fields_of, members, words
from mbd_core.multitf.run.__main__ import main as WITHOUT_RAY
from mbd_core.tables import Table, markdown

FILE_OBJECTS = {
    "`args`": ServingArgs,
    "each of `models`": ModelArgs,
    "`engine` of a model": EngineConfig,
    "`replicas` of a model, where it is no number": Autoscaling,
}
OPENING = """The options of the commands, and every field of the `args` in a Serve config file. They come from the
dataclasses that use the values: `python -m jobs.option_tables > docs/reference/options.md` writes the page, and
`tests/house/test_options.py` holds it to them. `--help` of a command shows its options. A row without dashes is a
field without an option: `--set PATH=VALUE` changes it. Where `,...` stands, one option takes a list with commas; other
lists repeat their option."""
MANY = 3
"""A command that shares at least this many options with a larger command lists them in one line of names."""
IN_A_FILE = """The `args` of the application have the options of `jobs/serve.py` by the names below, and fields
without an option. Unknown names are refused. [k8s/base/serve.yaml](../../k8s/base/serve.yaml) is such a file."""
DECODING = """What a request's `decoding`, `--decoding`, and the methods and the `--grid` of a sweep may set. A dot
leads to a field of an object: `t2t.tau` is `{"t2t": {"tau": ...}}`."""
COLUMNS = ("values", "default", "what it is")
ON_CLUSTERS = ("train", "prepare", "sweep", "rl", "serve")
OPENERS: dict[OpenedBy, str] = {
    "job": "the job's own process, on its machine only",
    "workers": "workers, who need the same contents on each machine; small contents are copied to them",
    "all": "the job, its workers and jobs that continue it: one folder that all of them see, or a URL",
    "each": "each worker its own, on its machine",
}


def page() -> str:
    """The whole page."""
    shared = [
        f"{place}, as on the command line: "
        + ", ".join(f"`{item.name}`" for item in fields_of(kind) if not _only_in_files(kind, item))
        for place, kind in FILE_OBJECTS.items()
        if kind is not Autoscaling
    ]
    in_a_file = [
        ("" if number else place, f"`{item.name}`", *_row(item))
        for place, kind in FILE_OBJECTS.items()
        for number, item in enumerate(item for item in fields_of(kind) if _only_in_files(kind, item))
    ]
    decoding = [(f"`{item.path}`", *_row(item)) for item in _with_parts(DecodingConfig)]
    heads = ("object", "field", *COLUMNS)
    tables = [
        Table(title="Options", level=1, lead=[OPENING]),
        *_command_tables(),
        Table(title="A Serve config file", lead=[IN_A_FILE, shared], columns=heads, rows=in_a_file),
        _paths(),
        Table(title="Decoding fields", lead=[DECODING], columns=heads[1:], rows=decoding),
    ]
    return markdown(tables)


def described_commands() -> Iterator[tuple[str, str, Main]]:
    """How each command is called, its file, and its entry; sub-commands of a command come after it."""
    for name, (module, _) in COMMANDS.items():
        if module.startswith("jobs."):
            job, file = importlib.import_module(module), f"{module.replace('.', '/')}.py"
            mains: dict[str, Main] = getattr(job, "COMMANDS", None) or {name: job.main}
            for part, main in mains.items():
                if main.options:
                    yield f"mbd {name}" if part == name else f"mbd {name} {part}", file, main
    yield WITHOUT_RAY.called, "mbd_core/multitf/run", WITHOUT_RAY


def _paths() -> Table:
    """Who opens the paths of commands that use a cluster, as the fields say."""
    opened: dict[str, list[str]] = {who: [] for who in OPENERS}
    for name, _, main in described_commands():
        name = name.removeprefix("mbd ")
        if name not in ON_CLUSTERS:
            continue
        for who, options in opened.items():
            named = [f"`{_name(main, item)}`" for item in main.options if item.flag.opened_by == who]
            options += [f"{name}: {', '.join(named)}"] if named else []
    return Table(
        title="Paths on a cluster whose machines share no disk",
        columns=("who opens them", "paths"),
        rows=[(words, "; ".join(opened[who])) for who, words in OPENERS.items()],
    )


def _command_tables() -> Iterator[Table]:
    """A table for each command. If a command shares `MANY` rows or more with a larger command, these rows are only
    named."""
    commands = list(described_commands())
    rows = {name: {_name(main, item): _row(item) for item in by_panel(main.options)} for name, _, main in commands}
    for name, file, _ in commands:
        shared: dict[str, list[str]] = {}
        for option, row in rows[name].items():
            larger = [other for other in rows if len(rows[other]) > len(rows[name]) and rows[other].get(option) == row]
            if larger:
                shared.setdefault(max(larger, key=lambda other: len(rows[other])), []).append(option)
        also = {other: options for other, options in shared.items() if len(options) >= MANY}
        elsewhere = {option for options in also.values() for option in options}
        yield Table(
            title=f"{name}, {file}",
            lead=[f"As in `{other}`: {', '.join(f'`{option}`' for option in also[other])}." for other in also],
            columns=("option", *COLUMNS),
            rows=[(f"`{option}`", *row) for option, row in rows[name].items() if option not in elsewhere],
        )


def _name(main: Main, item: Field) -> str:
    if not main.shows(item):
        return item.path
    return str(item.flag.metavar) if item.flag.positional else flag(item)


def _with_parts(kind: type, path: str = "") -> Iterator[Field]:
    """The fields of a configuration, each followed by the fields of the configuration that it holds."""
    for item in fields_of(kind):
        yield replace(item, path=f"{path}{item.name}")
        for part in members(item.hint):
            if isinstance(part, type) and is_dataclass(part):
                yield from _with_parts(part, f"{path}{item.name}.")


def _only_in_files(kind: type, item: Field) -> bool:
    return kind is Autoscaling or item.flag.name is False or is_dataclass(item.hint)


def _row(item: Field) -> list[str]:
    return [_values(item), _default(item), item.help]


def _values(item: Field) -> str:
    """The values a field takes, without article and `null`."""
    if item.flag.panel and not item.flag.positional and metavar(item) not in (None, "N", "X"):
        return f"`{metavar(item)}`"
    values = words(item.schema)
    if item.flag.panel and values.endswith("true, false"):
        return "switch"
    articles = ("a ", "an ", "one of null, ", "one of ")
    article = next((each for each in articles if values.startswith(each)), None)
    return values if article is None else values.removeprefix(article).replace('"', "`")


def _default(item: Field) -> str:
    """The default, as --help shows it."""
    if item.flag.default:
        return item.flag.default
    if item.default is MISSING:
        return "**required**"
    if item.default in (None, (), {}, "") or is_dataclass(item.default):
        return ""
    return f"`{item.default if isinstance(item.default, str | Path) else json.dumps(item.default)}`"


if __name__ == "__main__":
    print(page(), end="")
