"""The tables of options in the documents: `python -m jobs.option_tables > docs/reference/options.md`."""

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, is_dataclass

from actors.serving.args import Autoscaling, ModelArgs, ServingArgs
from jobs.__main__ import COMMANDS
from jobs.command_line import command_options, flag
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas, Leap, MultiBlock, Refresh
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Levenshtein, Soft
from mbd_core.engine.config import EngineConfig
from mbd_core.options import PANELS, OptionField, members, options_of

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
}
DECODING = """## Decoding fields

What a request's `decoding`, a method of a sweep and `--decoding` may set.
"""
IN_A_FILE = """## A Serve config file

The `args` of the application have the options of `jobs/serve.py` by the names below, and what a command line does not
have; unknown names are refused. [k8s/base/serve.yaml](../../k8s/base/serve.yaml) is such a file.
"""


def page() -> str:
    """The whole page."""
    commands = [_command_section(name, module, run) for name, module, run in described_commands()]
    decoding = [f"### {place}\n\n" + _field_table(options_of(kind)) for place, kind in DECODING_OBJECTS.items()]
    return "\n".join([OPENING, *commands, IN_A_FILE, *_file_sections(), DECODING, *decoding])


def described_commands() -> Iterator[tuple[str, str, Callable[..., None]]]:
    """Name, module and function of each command whose options are described by `Option`."""
    for name, (module, _) in COMMANDS.items():
        if module.startswith("jobs."):
            run = getattr(importlib.import_module(module), "run", None)
            if run is not None and command_options(run):
                yield name, module, run


def _command_section(name: str, module: str, run: Callable[..., None]) -> str:
    items = command_options(run)
    items.sort(key=lambda item: PANELS.index(item.option.panel) if item.option.panel else -1)
    rows = [[f"`{_name(item)}`", _values(item), _default(item), item.option.help] for item in items]
    heading = f"## mbd {name}, {module.replace('.', '/')}.py"
    return f"{heading}\n\n" + _table(["option", "values", "default", "what it is"], rows)


def _name(item: OptionField) -> str:
    return str(item.option.metavar) if item.option.positional else flag(item)


def _file_sections() -> Iterator[str]:
    for place, kind in FILE_OBJECTS.items():
        items = options_of(kind)
        shared = [f"`{item.name}`" for item in items if not _is_for_files(item) and kind is not Autoscaling]
        also = f"As on the command line: {', '.join(shared)}.\n\n" if shared else ""
        file_items = [item for item in items if _is_for_files(item) or kind is Autoscaling]
        yield f"### {place}\n\n{also}" + _field_table(file_items)


def _field_table(items: Iterable[OptionField]) -> str:
    rows = [[f"`{item.name}`", _values(item), _default(item), item.option.help] for item in items]
    return _table(["field", "values", "default", "what it is"], rows)


def _is_for_files(item: OptionField) -> bool:
    return item.option.flag is False or is_dataclass(item.hint)


def _values(item: OptionField) -> str:
    """The values, without an article and `null`."""
    if item.option.metavar and not item.option.positional:
        return f"`{item.option.metavar}`"
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
    return f"`{item.default if isinstance(item.default, str) else json.dumps(item.default)}`"


def _table(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
