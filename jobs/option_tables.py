"""The tables of options in the documents: `python -m jobs.option_tables > docs/reference/options.md`."""

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, is_dataclass
from pathlib import Path

from actors.serving.args import Autoscaling, ModelArgs, ServingArgs
from jobs.__main__ import COMMANDS
from jobs.command_line import by_panel, command_options
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas, Leap, MultiBlock, Refresh
from mbd_core.decoding.blocks.causal_config import Causal, Thinking
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Levenshtein, Soft
from mbd_core.engine.config import EngineConfig
from mbd_core.options import OptionField, flag, members, options_of

FILE_OBJECTS = {
    "`args`": ServingArgs,
    "each of `models`": ModelArgs,
    "`engine` of a model": EngineConfig,
    "`replicas` of a model, where it is no number": Autoscaling,
}
OPENING = """# Options

Every option of the commands, and every field of the `args` in a Serve config file. They come from the dataclasses that
use the values: `python -m jobs.option_tables > docs/reference/options.md` writes the page, and
`tests/house/test_options.py` holds it to them. `--help` of a command shows the same. Lists are given with commas where
`,...` stands; other lists repeat their option.
"""
DECODING_OBJECTS = {
    "`decoding`": DecodingConfig,
    "`entropy`": EntropyBound,
    "`t2t`": T2T,
    "`soft`": Soft,
    "`edit`": Levenshtein,
    "`canvas`": Canvas,
    "`leap` of a canvas": Leap,
    "`refresh` of a canvas": Refresh,
    "`branches` of a canvas": Branches,
    "`multi_block` of a canvas": MultiBlock,
    "`causal`": Causal,
    "`thinking` of `causal`": Thinking,
}
MANY = 3
"""From this number on, options that a larger command has too are a line of names."""
DECODING = """## Decoding fields

What a request's `decoding`, a method of a sweep and `--decoding` may set.
"""
IN_A_FILE = """## A Serve config file

The `args` of the application have the options of `jobs/serve.py` by the names below, and what a command line does not
have; unknown names are refused. [k8s/base/serve.yaml](../../k8s/base/serve.yaml) is such a file.
"""


def page() -> str:
    """The whole page."""
    decoding = _object_table(DECODING_OBJECTS)
    return "\n".join([OPENING, *_command_sections(), IN_A_FILE, _file_section(), DECODING, decoding])


def described_commands() -> Iterator[tuple[str, str, Callable[..., None]]]:
    """Name, module and function of each command whose options are described by `Option`."""
    for name, (module, _) in COMMANDS.items():
        if module.startswith("jobs."):
            run = getattr(importlib.import_module(module), "run", None)
            if run is not None and command_options(run):
                yield name, module, run


def _command_sections() -> Iterator[str]:
    """A section for each command. From `MANY` on, rows that a larger command has too stand there alone."""
    commands = list(described_commands())
    rows = {name: {_name(item): _row(item) for item in by_panel(command_options(run))} for name, _, run in commands}
    for name, module, _ in commands:
        shared: dict[str, list[str]] = {}
        for option, row in rows[name].items():
            larger = [other for other in rows if len(rows[other]) > len(rows[name]) and rows[other].get(option) == row]
            if larger:
                shared.setdefault(larger[0], []).append(option)
        also = {other: options for other, options in shared.items() if len(options) >= MANY}
        elsewhere = {option for options in also.values() for option in options}
        lines = [f"As of `mbd {other}`: {', '.join(f'`{option}`' for option in also[other])}.\n" for other in also]
        own = [[f"`{option}`", *row] for option, row in rows[name].items() if option not in elsewhere]
        heading = f"## mbd {name}, {module.replace('.', '/')}.py\n"
        yield "\n".join([heading, *lines, _table(["option", "values", "default", "what it is"], own)])


def _row(item: OptionField) -> list[str]:
    return [_values(item), _default(item), item.option.help]


def _name(item: OptionField) -> str:
    return str(item.metavar) if item.option.positional else flag(item)


def _file_section() -> str:
    lines = []
    for place, kind in FILE_OBJECTS.items():
        shared = [f"`{item.name}`" for item in options_of(kind) if not _only_in_files(kind, item)]
        if shared:
            lines.append(f"- {place}, as on the command line: {', '.join(shared)}.\n")
    return "".join(lines) + "\n" + _object_table(FILE_OBJECTS, _only_in_files)


def _object_table(
    objects: dict[str, type], is_shown: Callable[[type, OptionField], bool] = lambda kind, item: True
) -> str:
    """The fields of several objects; the first row of each names it."""
    rows = []
    for place, kind in objects.items():
        shown = [item for item in options_of(kind) if is_shown(kind, item)]
        rows += [["" if i else place, f"`{item.name}`", *_row(item)] for i, item in enumerate(shown)]
    return _table(["object", "field", "values", "default", "what it is"], rows)


def _only_in_files(kind: type, item: OptionField) -> bool:
    return kind is Autoscaling or item.option.flag is False or is_dataclass(item.hint)


def _values(item: OptionField) -> str:
    """The values, without an article and `null`."""
    if item.metavar and not item.option.positional:
        return f"`{item.metavar}`"
    if bool in members(item.hint) and item.option.panel:
        return "switch"
    for article in ("a ", "an ", "one of null, ", "one of "):
        if item.values.startswith(article):
            return item.values.removeprefix(article).replace('"', "`")
    return item.values


def _default(item: OptionField) -> str:
    """The default, as --help shows it; nothing where the text of the option has it."""
    if item.option.default:
        return item.option.default
    if item.default is MISSING:
        return "**required**"
    if item.default in (None, (), {}, "") or is_dataclass(item.default):
        return ""
    return f"`{item.default if isinstance(item.default, str | Path) else json.dumps(item.default)}`"


def _table(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
