"""Options: a field's help, bounds and panel stand once, at the field of the dataclass that uses the value.

    max_rows: Annotated[int, Option("Sequences decoded at once.", ENGINE, at_least=1)] = 16

`check` holds an instance against its annotations, `read` builds one from JSON or YAML, `changed` changes one, and
`options_of` lists the fields. `jobs/command_line.py` and a training without Ray derive command lines from that list,
and `jobs/option_tables.py` the documents' tables.
"""

import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from mbd_core.json_text import parse_json

# The panels of --help, in this order.
MODEL, DATA, DECODING, ENGINE, CLUSTER, OUTPUT = "What runs", "Data", "Decoding", "Engine", "Cluster", "Output"
LOAD = "Load"
UPDATES, STATES, LORA, COMPUTING = "Updates", "Training states", "Adapter (LoRA)", "How a step is computed"
PANELS = (MODEL, DATA, LOAD, UPDATES, STATES, LORA, COMPUTING, DECODING, ENGINE, CLUSTER, OUTPUT)
MOST = 2**31 - 1  # of counts that tensors of 32-bit integers hold
LISTS = (tuple, list, Sequence)
VALUE_TEXTS = {int: "whole numbers", float: "numbers", str: "texts"}
LIST_METAVARS = {int: "N,...", float: "X,...", str: "NAME,..."}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """What an annotation says of a field.

    panel       the panel of --help that shows it
    at_least    bounds of a number, or of each number in a list; `above` is exclusive
    flag        the name on a command line (default: the field's name); `False`: it is read from files alone, and so
                are the options inside a dataclass
    positional  an argument of a command line instead of an option
    metavar     what --help shows for the value (default: its type, "N,..." or "NAME,..." for one text)
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

    @property
    def metavar(self) -> str | None:
        """What --help shows for the value; `None`: its type."""
        if self.option.metavar is None and self.option.separator is not None:
            return LIST_METAVARS[typing.get_args(plain_type(self.hint))[0]]
        return self.option.metavar

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


def changes_of(kind: type, path: str = "") -> Iterator[OptionField]:
    """The options of a dataclass and of those that it holds, by their paths (`train.lr`); none has a default.

    A field whose values are dataclasses alone, or nothing, stands for the options of the first of them.
    """
    options, hints = {item.name: item for item in options_of(kind)}, typing.get_type_hints(kind)
    for data_field in fields(kind):
        item = options.get(data_field.name)
        if item is not None and item.option.flag is False:
            continue
        kinds = [member for member in members(hints[data_field.name]) if member is not type(None)]
        if all(map(is_dataclass, kinds)):
            inner = kinds[0]
            yield from changes_of(typing.cast(type, inner), f"{path}{data_field.name}.")
        elif item is not None:
            yield replace(item, name=f"{path}{data_field.name}", hint=item.hint | None, default=None)


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
    known_fields = _known_fields(kind, values, noun, path)
    for name, item in known_fields.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{noun} '{path}{name}' is missing")
    hints = typing.get_type_hints(kind)
    converted = {name: _convert(hints[name], value, noun, f"{path}{name}") for name, value in values.items()}
    return _named_in(path, lambda: kind(**converted))


def changed(instance: T, values: Any, *, noun: str = "option", path: str = "") -> T:
    """A dataclass with the fields that a JSON or YAML file, or a command line, gives: those that it holds are changed
    in turn, an object that is no dataclass by its keys. Raises `ValueError` as `read` does."""
    kind = type(instance)
    _known_fields(kind, values, noun, path)
    hints, converted = typing.get_type_hints(kind), {}
    for name, value in values.items():
        old_value, place = getattr(instance, name), f"{path}{name}"
        if isinstance(value, Mapping) and isinstance(old_value, dict):
            converted[name] = {**old_value, **value}
        elif (
            isinstance(value, Mapping)
            and is_dataclass(old_value)
            and value.keys() <= {item.name for item in fields(old_value)}
        ):
            converted[name] = changed(typing.cast(Any, old_value), value, noun=noun, path=f"{place}.")
        else:
            converted[name] = _convert(hints[name], value, noun, place)
    return _named_in(path, lambda: replace(instance, **converted))  # type: ignore[type-var]


def _known_fields(kind: type, values: Any, noun: str, path: str) -> dict[str, Any]:
    """The fields of a dataclass by name; `ValueError` for values that are no object of some of them."""
    if not isinstance(values, Mapping):
        raise OptionRefused(path.removesuffix("."), f"={value_text(values)} must be {_kind_text(kind)}")
    known_fields = {item.name: item for item in fields(kind)}
    unknown_names = sorted(str(name) for name in values if name not in known_fields)
    if unknown_names:
        matches = difflib.get_close_matches(unknown_names[0], known_fields, n=1)
        hint = f"; is '{matches[0]}' meant?" if matches else ""
        raise ValueError(f"unknown {noun} '{path}{unknown_names[0]}'; known: {', '.join(known_fields)}{hint}")
    return known_fields


def _named_in(path: str, build: Callable[[], T]) -> T:
    """What `build` returns; a field that it refuses is named with its path."""
    try:
        return build()
    except OptionRefused as error:
        raise OptionRefused(f"{path}{error.path}", error.text) from None


def _convert(hint: Any, value: Any, noun: str, path: str) -> Any:
    """A JSON value as a field takes it: objects as dataclasses, lists as tuples, texts as paths, where the hint has
    them; any other as it is."""
    kinds = [member for member in members(hint) if is_dataclass(member)]
    kinds.sort(key=lambda kind: not isinstance(value, Mapping) or not value.keys() <= {f.name for f in fields(kind)})
    for member in (*kinds, *members(hint)):  # of several dataclasses the one that has the values' names
        if is_dataclass(member) and isinstance(value, Mapping):
            return read(typing.cast(type, member), value, noun=noun, path=f"{path}.")
        if member is Path and isinstance(value, str):
            return Path(value)
        if typing.get_origin(member) in LISTS and isinstance(value, list):
            item = typing.get_args(member)[0]
            return tuple(_convert(item, each, noun, f"{path}.{number}") for number, each in enumerate(value))
    if kinds and not _fits(value, hint):
        raise OptionRefused(path, f"={value_text(value)} must be {_kind_text(kinds[0])}")
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
        kind = VALUE_TEXTS.get(typing.get_args(hint)[1])
        return "an object" if kind is None else f"an object whose values are {kind}"
    return {int: "a whole number", float: "a number", str: "a text", Path: "a path"}.get(hint, str(hint))


# Options as texts of a command line.


def flag(item: OptionField) -> str:
    """An option's name on the command line; a switch has two, if it is on by default or can be left open."""
    if item.option.flag:
        return item.option.flag
    name = item.name.rpartition(".")[2].replace("_", "-")
    return f"--{name}/--no-{name}" if plain_type(item.hint) is bool and item.default is not False else f"--{name}"


def plain_type(hint: Any) -> Any:
    """The type of an option's value on a command line, where an object of fields and nothing have no form."""
    return next(member for member in members(hint) if member is not type(None) and not is_dataclass(member))


def is_json(hint: Any) -> bool:
    """Whether the value is JSON on a command line: an object, or a list of lists."""
    kind = plain_type(hint)
    is_list = typing.get_origin(kind) in LISTS
    return typing.get_origin(kind) is dict or (is_list and typing.get_origin(typing.get_args(kind)[0]) in LISTS)


def value_of(item: OptionField, cli_value: Any) -> Any:
    """A field's value from what a command line gives, `None` for nothing; `ValueError`, naming the option, for one
    that the field refuses."""
    kind, name = plain_type(item.hint), flag(item).partition("/")[0]
    value = cli_value
    if is_json(item.hint):
        is_object = typing.get_origin(kind) is dict
        value = item.default if cli_value is None else (json_object if is_object else _json_lists)(cli_value, name)
    elif typing.get_origin(kind) in LISTS:
        if item.option.separator and cli_value is not None:
            item_type = typing.get_args(kind)[0]
            value = names(cli_value, name)
            if item_type is float:
                value = [_float(text, name) for text in cli_value.split(",") if text.strip()]
            elif item_type is int:
                value = numbers(cli_value, name, at_least=int(item.option.at_least or 0))
        value = tuple(value) if value else item.default if item.default is not MISSING else ()
    refusal = item.refusal(value)
    if refusal is not None:
        raise ValueError(f"{name} {cli_value} {refusal}")
    return value


def json_object(text: str, option: str) -> dict[str, Any]:
    """A JSON object that was given as an option; `ValueError` if it is none."""
    value = parse_json(text, f"{option} {text!r}")
    if not isinstance(value, dict):
        raise ValueError(f"{option} {text!r} must be a JSON object")
    return value


def _json_lists(text: str, option: str) -> tuple[tuple[Any, ...], ...]:
    value = parse_json(text, f"{option} {text!r}")
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        raise ValueError(f"{option} {text!r} must be a JSON list of lists, as [[0.1, 0.2], [0.8, 1.0]]")
    return tuple(map(tuple, value))


def names(text: str, option: str) -> list[str]:
    """A comma-separated list without repetitions; `ValueError` if it is empty."""
    items = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not items:
        raise ValueError(f"{option} names nothing; give at least one, separated by commas")
    return items


def numbers(text: str, option: str, *, at_least: int = 1) -> list[int]:
    """A comma-separated list of whole numbers; `ValueError` names the one that is not, or is too small."""
    for name in names(text, option):
        if not name.isdecimal() or int(name) < at_least:
            raise ValueError(f"{option} {name} must be a whole number of at least {at_least}")
    return [int(name) for name in names(text, option)]


def _float(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} {text} must be a number") from None
