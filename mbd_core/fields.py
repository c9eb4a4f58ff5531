'''Fields: the facts about a configuration's field are said once, where the field is.

    @configuration(panel=ENGINE)
    class EngineConfig:
        max_rows: Annotated[int, Ge(1)] = 16
        """Sequences decoded at once."""

The annotation has the type and the bounds, the docstring below it the help. Construction and `dataclasses.replace`
check both; `load` reads JSON, `changed` changes an instance. Command lines (`mbd_core/command_line.py`), JSON Schemas
and the tables of docs/reference come from `fields_of`. Every refusal is one sentence (`refusal`).

pydantic checks and converts. A machine that is lent for GPU checks has no pydantic (docs/reference/gpu.md). There a
configuration is a plain dataclass: only `__post_init__` checks it, types and bounds are unchecked, and `load` raises.
'''

import difflib
import functools
import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

try:
    from annotated_types import Ge, Gt, Le
    from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError
    from pydantic.dataclasses import dataclass as checked_dataclass
except ModuleNotFoundError as missing:
    if missing.name not in ("annotated_types", "pydantic"):
        raise
    CHECKED = False
    Ge = Gt = Le = Strict = lambda bound: bound  # type: ignore[assignment,misc]
else:
    CHECKED = True
    CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

# The panels of --help, in this order.
MODEL, DATA, DECODING, ENGINE, CLUSTER, OUTPUT = "What runs", "Data", "Decoding", "Engine", "Cluster", "Output"
LOAD = "Load"
UPDATES, STATES, LORA, COMPUTING = "Updates", "Training states", "Adapter (LoRA)", "How a step is computed"
PANELS = (MODEL, DATA, LOAD, UPDATES, STATES, LORA, COMPUTING, DECODING, ENGINE, CLUSTER, OUTPUT)
OpenedBy = Literal["job", "workers", "all", "each"]
"""Who opens a path. job: only the job's process. workers: the workers, which read the same contents as the job. all:
the job, its workers and a resumed job, which share one folder. each: every process, on its own machine."""
MOST = 2**31 - 1  # the largest count that a tensor of 32-bit integers holds
T = TypeVar("T")
Texts = Annotated[tuple[str, ...], Strict(False)]
"""Texts that a call may give as a list."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """In a field's annotation: how a command line shows the field, beyond its name, type and docstring.

    help        the help of a parameter, which has no docstring, or a help with parts that are computed
    panel       the panel of --help (default: the dataclass's)
    name        the name on a command line (default: the field's); `False`: only files have the field
    positional  an argument of a command line instead of an option
    metavar     the word for the value in --help
    default     the words for the default in --help
    commas      a list is one text with commas (default: the option is repeated for each item)
    opened_by   who opens the path, URL or model that the value names
    """

    help: str = field(default="", kw_only=False)
    panel: str | None = field(default=None, kw_only=False)
    name: str | Literal[False] | None = None
    positional: bool = False
    metavar: str | None = None
    default: str | None = None
    commas: bool = False
    opened_by: OpenedBy | None = None


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def configuration(*, panel: str | None = None) -> Callable[[type[T]], type[T]]:
    """A class as a configuration: a strict, frozen, keyword-only dataclass. `panel` is the panel of its fields."""

    def decorated(cls: type[T]) -> type[T]:
        if not CHECKED:
            return dataclass(frozen=True, kw_only=True)(cls)
        kind: Any = checked_dataclass(cls, frozen=True, kw_only=True, config=CONFIG)
        kind.__panel__ = panel
        build = kind.__init__

        @functools.wraps(build)
        def checked(self: Any, *arguments: Any, **values: Any) -> None:
            try:
                build(self, *arguments, **values)
            except ValidationError as error:
                raise refusal(error, kind, values) from None

        kind.__init__ = checked
        return typing.cast(type[T], kind)

    return decorated


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a configuration, or a parameter of a command.

    path     the field's name, after the names of the fields that hold its configuration (`train.lr`)
    hint     the field's type with its bounds
    default  `MISSING` if the field is required
    """

    path: str
    hint: Any
    help: str = ""
    flag: Flag = Flag()
    default: Any = MISSING

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @functools.cached_property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of its values."""
        return schema_of(self.hint)


@functools.cache
def fields_of(kind: type) -> tuple[Field, ...]:
    """The fields of a configuration, in order."""
    found = []
    for name, info in typing.cast(Any, kind).__pydantic_fields__.items():
        flag = next((item for item in info.metadata if isinstance(item, Flag)), Flag())
        owner: Any = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
        described = owner.__pydantic_fields__[name].description
        flag = replace(flag, panel=flag.panel or getattr(owner, "__panel__", None))
        bounds = [item for item in info.metadata if not isinstance(item, Flag)]
        default = MISSING if info.is_required() else info.get_default(call_default_factory=True)
        hint = Annotated[(info.annotation, *bounds)] if bounds else info.annotation
        found.append(
            Field(
                path=name,
                hint=hint,
                help=" ".join((described or flag.help).split()),
                flag=flag,
                default=default,
            )
        )
    return tuple(found)


def leaves_of(kind: type, defaults: Any = MISSING, path: str = "") -> Iterator[Field]:
    """The fields of a configuration and of its inner configurations, by their paths, except fields with
    `Flag(name=False)`.

    `defaults` is an instance with other defaults. If a field may hold one of several configurations, or `None`, the
    first configuration's fields are given. A field without help is left out: only files have it.
    """
    for item in fields_of(kind):
        default = item.default if defaults is MISSING else getattr(defaults, item.name)
        kinds = [member for member in members(item.hint) if member is not type(None)]
        if item.flag.name is False:
            continue
        if hasattr(kinds[0], "__pydantic_fields__"):
            inner = default if isinstance(default, kinds[0]) else MISSING
            yield from leaves_of(kinds[0], inner, f"{path}{item.name}.")
        elif item.help and not is_dataclass(kinds[0]):
            yield replace(item, path=f"{path}{item.name}", default=default)


def load(kind: Any, values: Any, *, noun: str = "option", path: str = "") -> Any:
    """A configuration, or a value of another type, from its JSON form: objects, lists, texts, numbers.

    Raises `ValueError` that names the unknown, missing or refused field. `noun` is the word for a field in this
    sentence, `path` the place of the values, with a dot at its end.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(values, default=_plain))
    except ValidationError as error:
        raise refusal(error, kind, values, noun=noun, path=path) from None


def changed(instance: T, values: Any, *, noun: str = "option", path: str = "") -> T:
    """The configuration, changed by the fields that a JSON or YAML file or a command line gives. The configurations
    that it holds are changed in the same way, its other objects key by key. Raises `ValueError` as `load` does."""
    merged = _merged(instance, values) if isinstance(values, Mapping) else values
    return typing.cast(T, load(type(instance), merged, noun=noun, path=path))


def _merged(instance: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    merged = {item.name: getattr(instance, item.name) for item in fields(instance)}
    for name, value in values.items():
        old = merged.get(name)
        if isinstance(value, Mapping) and is_dataclass(old) and value.keys() <= {item.name for item in fields(old)}:
            merged[name] = _merged(old, value)
        else:
            merged[name] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, dict) else value
    return merged


def _plain(value: Any) -> Any:
    """The JSON form of a configuration or a path."""
    if is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"{value!r} of type {type(value).__name__} has no form in JSON")


@functools.cache
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    if not CHECKED:
        raise ModuleNotFoundError("reading a configuration needs pydantic: pip install pydantic", name="pydantic")
    if is_dataclass(kind) and not hasattr(kind, "__pydantic_config__"):  # read as strictly as inside a configuration
        typing.cast(Any, kind).__pydantic_config__ = CONFIG
    return TypeAdapter(kind, config=None if hasattr(kind, "__pydantic_config__") else CONFIG)


@functools.cache
def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a type's values."""
    return _adapter(kind).json_schema()


def check_effects(
    config: Any,
    path: str,
    *,
    chooser: str,
    effects: Mapping[str, Collection[str]],
    given: Collection[str] | None = None,
) -> None:
    """Raises `ValueError` for a field that is set and has no effect with the value of the field `chooser`.

    `effects` gives for each field the values of `chooser` with which the field has an effect. `path` is the
    configuration's path. `given` names the fields that are set; by default those that differ from the class's.
    """
    choice = getattr(config, chooser)
    for name, choices in effects.items():
        value = getattr(config, name)
        is_set = value != getattr(type(config), name) if given is None else name in given
        if choice not in choices and is_set:
            raise ValueError(
                f"{path}.{name}={value!r} has no effect with {path}.{chooser}={choice!r}; leave it out, or let "
                f"{chooser} be {' or '.join(choices)}"
            )


def refusal(error: "ValidationError", kind: Any, values: Any, *, noun: str = "option", path: str = "") -> ValueError:
    """pydantic's error as one sentence that names the field: an unknown field first, then a missing one, then others.

    An error of a `__post_init__` is returned as it is.
    """
    problem: Any = min(error.errors(include_url=False), key=lambda each: ORDER.get(each["type"], len(ORDER)))
    hint, value, place = kind, values, problem["loc"]
    context = problem.get("ctx", {})
    if isinstance(context.get("error"), ValueError):
        return typing.cast(ValueError, context["error"])
    if is_dataclass(kind) and place:
        name, *place = place
        if problem["type"] == UNKNOWN and not place:
            known = [item.name for item in fields(kind)]
            near = difflib.get_close_matches(str(name), known, n=1)
            meant = f"; is '{near[0]}' meant?" if near else ""
            return ValueError(f"unknown {noun} '{path}{name}'; known: {', '.join(known)}{meant}")
        if problem["type"] == LACKING and not place:
            return ValueError(f"{noun} '{path}{name}' is missing")
        hint, value, path = _hints(typing.cast(type, kind))[name], values.get(name), f"{path}{name}."
    for step in place if _kinds(hint) else ():
        if isinstance(value, list | tuple) and isinstance(step, int):  # other steps name a form of the value
            value, hint, path = value[step], _kinds(hint)[0], f"{path}{step}."
    forms: list[Any] = [each for each in members(hint) if is_dataclass(each)]
    if forms and isinstance(value, Mapping) and value is not values:
        form = next((each for each in forms if value.keys() <= _hints(each).keys()), forms[0])
        try:  # the form's own refusal; errors of other forms do not help
            load(form, value, noun=noun, path=path)
        except ValueError as inner:
            return inner
    remedy = f"at most {MOST}" if context.get("le") == MOST else words(schema_of(hint))
    if problem["type"] == "finite_number":
        remedy = remedy.replace("a number", "a finite number")
    given = json.dumps(value, default=repr)
    return ValueError(f"{path.removesuffix('.')}{'=' if path else ''}{given} must be {remedy}")


UNKNOWN, LACKING = "unexpected_keyword_argument", "missing"  # pydantic's names
ORDER = {UNKNOWN: 0, LACKING: 1}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _kinds(hint: Any) -> list[Any]:
    """The dataclasses in a type: the type itself, the members of a union, or the values of a list or an object."""
    if isinstance(hint, type) and is_dataclass(hint):
        return [hint]
    return [kind for argument in typing.get_args(hint) for kind in _kinds(argument)]


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself, without their bounds."""
    if typing.get_origin(hint) is Annotated:
        hint = hint.__origin__
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return tuple(each for member in typing.get_args(hint) for each in members(member)) if is_union else (hint,)


SINGULAR = {"integer": "a whole number", "number": "a number", "string": "a text", "boolean": "one of true, false"}
PLURAL = {"integer": "whole numbers", "number": "numbers", "string": "texts", "array": "lists"}


def words(schema: Mapping[str, Any]) -> str:
    """The values of a JSON Schema in words: "a whole number of at least 1", "one of null, true, false"."""
    forms = schema.get("anyOf") or schema.get("oneOf") or [schema]
    kinds = [form for form in forms if form.get("type") != "null"]
    if all("enum" in kind or "const" in kind or kind.get("type") == "boolean" for kind in kinds):
        choices: list[Any] = [None] if len(kinds) < len(forms) else []
        for kind in kinds:
            choices += kind.get("enum") or ([kind["const"]] if "const" in kind else [True, False])
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(json.dumps, choices))
    return " or ".join(dict.fromkeys(map(_form_words, kinds)))


def _form_words(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if "$ref" in schema or (kind == "object" and "title" in schema):
        return f"an object with the fields of {(schema.get('$ref') or schema['title']).rpartition('/')[2]}"
    if kind == "object":
        values = schema.get("additionalProperties")
        inner = PLURAL.get(values.get("type", "")) if isinstance(values, Mapping) else None
        return f"an object whose values are {inner}" if inner else "an object"
    if kind == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        number = f"{schema['minItems']} " if schema.get("minItems") and "prefixItems" in schema else ""
        inner = PLURAL.get(items.get("type", ""))
        return f"a list of {number}{inner} {bounds(items)}".strip() if inner else "a list"
    if schema.get("format") == "path":
        return "a path"
    return f"{SINGULAR.get(str(kind), 'any value')} {bounds(schema)}".strip()


def bounds(schema: Mapping[str, Any]) -> str:
    """The bounds of a number in words: "from 0 to 1", "above 0 and at most 1"; "" for none, and for `MOST`."""
    least, most = schema.get("minimum"), schema.get("maximum")
    most = None if most == MOST else most
    if least is not None and most is not None:
        return f"from {_number(least)} to {_number(most)}"
    named = {"of at least": least, "above": schema.get("exclusiveMinimum"), "at most": most}
    return " and ".join(f"{text} {_number(value)}" for text, value in named.items() if value is not None)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"
