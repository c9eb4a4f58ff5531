"""Options: a field's help, bounds and panel stand once, at the field of the dataclass that uses the value.

    max_rows: Annotated[int, Option("Sequences decoded at once.", ENGINE, at_least=1)] = 16

`check` holds an instance against its annotations, `read` builds one from JSON or YAML, and `options_of` lists the
fields. `jobs/command_line.py` derives command lines from that list, and `jobs/option_tables.py` the documents' tables.
"""

import functools
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

MODEL, DATA, DECODING, ENGINE, CLUSTER, OUTPUT = (
    "What runs",
    "Data",
    "Decoding",
    "Engine",
    "Cluster",
    "Output",
)  # the panels of --help, in this order
PANELS = (MODEL, DATA, DECODING, ENGINE, CLUSTER, OUTPUT)
MOST = 2**31 - 1  # of counts that tensors of 32-bit integers hold
LISTS = (tuple, list, Sequence)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What an annotation says of a field.

    panel       the panel of --help that shows it
    at_least    bounds of a number, or of each number in a list; `above` is exclusive
    flag        the name on a command line (default: the field's name); `False`: it is read from files alone, and so
                are the options inside a dataclass
    positional  an argument of a command line instead of an option
    metavar     what --help shows for the value (default: its type)
    default     what --help shows for the default (default: the default itself)
    separator   a list is one text with this between its items (default: the option is repeated for each item)
    """

    help: str = field(kw_only=False)
    panel: str | None = field(default=None, kw_only=False)
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    flag: str | Literal[False] | None = None
    positional: bool = False
    metavar: str | None = None
    default: str | None = None
    separator: str | None = None

    def allows(self, number: float) -> bool:
        """Whether a number is within the bounds."""
        return (
            (isinstance(number, int) or math.isfinite(number))
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words: "from 0 to 1", "above 0 and at most 1"; "" for none, and for `MOST`."""
        at_most = None if self.at_most == MOST else self.at_most
        if self.at_least is not None and at_most is not None:
            return f"from {self.at_least:.15g} to {at_most:.15g}"
        bounds = {"of at least": self.at_least, "above": self.above, "at most": at_most}
        return " and ".join(f"{words} {value:.15g}" for words, value in bounds.items() if value is not None)


class OptionRefused(ValueError):
    """A field whose value is refused: its path, and what is wrong as the rest of the sentence."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}{text}")
        self.path, self.text = path, text


@dataclass(frozen=True, kw_only=True)
class OptionField:
    """A field with an option: its type without the annotation; `MISSING` as the default of a required one."""

    name: str
    hint: Any
    option: Option
    default: Any = MISSING

    def refusal(self, value: Any) -> str | None:
        """What the value must be, as the rest of a sentence; `None` if it is that."""
        if _fits(value, self.hint) and all(self.option.allows(number) for number in _numbers(value)):
            return None
        if self.option.at_most == MOST and any(number > MOST for number in _numbers(value)):
            return f"must be at most {MOST}"
        return f"must be {self.values}"

    @property
    def values(self) -> str:
        """What the values are, in words: "a whole number of at least 1", "one of null, true, false"."""
        every = members(self.hint)
        kinds = [member for member in every if member is not type(None)]
        if all(member is bool or typing.get_origin(member) is Literal for member in kinds):
            choices: list[Any] = [None] if len(kinds) < len(every) else []
            for member in kinds:
                choices += [True, False] if member is bool else typing.get_args(member)
            return "one of " + ", ".join(json.dumps(choice) for choice in choices)
        texts = {_kind_text(member): self.option.bounds if _has_numbers(member) else "" for member in kinds}
        return " or ".join(f"{text} {bounds}".strip() for text, bounds in texts.items())


@functools.cache
def options_of(kind: type) -> tuple[OptionField, ...]:
    """The fields of a dataclass that are annotated with an option, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    items = []
    for item in fields(kind):
        hint, option = split(hints[item.name])
        if option is not None:
            default = item.default if item.default_factory is MISSING else item.default_factory()
            items.append(OptionField(name=item.name, hint=hint, option=option, default=default))
    return tuple(items)


def split(hint: Any) -> tuple[Any, Option | None]:
    """A type hint without its annotations, and its option if it has one."""
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, None
    return hint.__origin__, next((item for item in hint.__metadata__ if isinstance(item, Option)), None)


def check(instance: Any) -> None:
    """Raise `ValueError`, naming the field, for a value of another type than annotated, or outside its bounds.

    A dataclass calls it in `__post_init__`, before its own rules on fields that contradict each other.
    """
    kind: type = type(instance)
    for item in options_of(kind):
        value = getattr(instance, item.name)
        refusal = item.refusal(value)
        if refusal is not None:
            raise OptionRefused(item.name, f"={value_text(value)} {refusal}")


def read(kind: type[T], values: Any, *, noun: str = "option", path: str = "") -> T:
    """Build a dataclass, and those that it holds, from the values of a JSON or YAML file.

    Raises `ValueError` that names the field which is unknown, missing or refused; `noun` is what such a field is
    called, `path` the place of the values in the file, with a dot at its end.
    """
    if not isinstance(values, Mapping):
        raise OptionRefused(path.removesuffix("."), f"={value_text(values)} must be {_kind_text(kind)}")
    items = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(str(name) for name in values if name not in items)
    if unknown:
        raise ValueError(f"unknown {noun} '{path}{unknown[0]}'; known: {', '.join(items)}")
    for name, item in items.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{noun} '{path}{name}' is missing")
    hints = typing.get_type_hints(kind)
    arguments = {name: _convert(hints[name], value, noun, f"{path}{name}") for name, value in values.items()}
    try:
        return kind(**arguments)
    except OptionRefused as error:
        raise OptionRefused(f"{path}{error.path}", error.text) from None


def _convert(hint: Any, value: Any, noun: str, path: str) -> Any:
    """A JSON value as a field takes it: objects as dataclasses, lists as tuples, texts as paths, where the hint has
    them; any other as it is."""
    for member in members(hint):
        if is_dataclass(member) and isinstance(value, Mapping):
            return read(typing.cast(type, member), value, noun=noun, path=f"{path}.")
        if member is Path and isinstance(value, str):
            return Path(value)
        if typing.get_origin(member) in LISTS and isinstance(value, list):
            item = typing.get_args(member)[0]
            return tuple(_convert(item, each, noun, f"{path}.{number}") for number, each in enumerate(value))
    return value


def value_text(value: Any) -> str:
    """A value in a sentence: as JSON where it is that, else as Python writes it."""
    return json.dumps(value, default=repr)


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type. A whole number is a number too; `True` is none."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if len(members(hint)) > 1:
        return any(_fits(value, member) for member in members(hint))
    if origin is Literal:
        return any(type(value) is type(argument) and value == argument for argument in arguments)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    if origin in LISTS:
        return isinstance(value, list | tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(_fits(item, arguments[1]) for item in value.values())
    return hint is Any or isinstance(value, hint)


def _has_numbers(hint: Any) -> bool:
    return hint in (int, float) or typing.get_origin(hint) in LISTS


def _numbers(value: Any) -> list[float]:
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, int | float) and not isinstance(item, bool)]


def _kind_text(hint: Any) -> str:
    if isinstance(hint, type) and is_dataclass(hint):
        return f"an object with the fields of {hint.__name__}"
    if typing.get_origin(hint) in LISTS:
        return "a list"
    if typing.get_origin(hint) in (dict, Mapping):
        return "an object"
    return {int: "a whole number", float: "a number", str: "a text", Path: "a path"}.get(hint, str(hint))
