"""JSON schemas for grammars: in llguidance's keywords, with bounds that it compiles rightly."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

MAX_LOOKS = 20_000  # at a schema's parts, including the targets of references
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose values are schemas by name
INNER = ("items", "additionalProperties", "prefixItems", "allOf", "anyOf", "oneOf")  # a schema, or a list of them
ON_A_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for JSON as `json.dumps` writes it, which models have learnt from chat templates and data."""
_BOUNDS = {"exclusiveMinimum": max, "minimum": max, "exclusiveMaximum": min, "maximum": min}
MAX_PATTERN = 64  # characters of a pattern that constants are compared with
ANNOTATIONS = (
    *("title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"),
    *("contentEncoding", "contentMediaType", "contentSchema", "enumNames", "enumDescriptions", "markdownDescription"),
    *("externalDocs", "xml"),
)
"""Keywords that say nothing about valid values."""
ANY_NAME: tuple[Any, ...] = ({}, True, {"type": "string"})
"""Schemas of names of members that allow every name."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""llguidance's formats. Other formats are left out, as in a validator that does not know them."""


def plain_schema(schema: Any) -> Any:
    """The same schema in llguidance's keywords.

    Keywords without effect are left out: annotations, names that begin with "x-", formats that llguidance does not
    have, `uniqueItems` if it holds anyway, `propertyNames` that allow every name. `oneOf` of constants that exclude
    each other becomes `anyOf`. An exclusive bound that is `true` or `false`, as in older schemas, becomes a number.
    Targets of references stay.
    """
    references = set[str]()
    _collect_references(schema, references)
    return _plain(schema, references)


def _collect_references(value: Any, names: set[str]) -> None:
    """The names on the paths of all references in a value."""
    if isinstance(value, list):
        for item in value:
            _collect_references(item, names)
    elif isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            names.update(reference.split("/"))
        for item in value.values():
            _collect_references(item, names)


def _plain(schema: Any, references: set[str]) -> Any:
    if isinstance(schema, list):
        return [_plain(part, references) for part in schema]
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, Any] = {}
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            value = {key: _plain(part, references) for key, part in value.items()}
        elif name in INNER:
            value = _plain(value, references)
        says_nothing = name in ANNOTATIONS or (name.startswith("x-") and name != "x-guidance")
        if not says_nothing or name in references:
            plain[name] = value
    if isinstance(plain.get("format"), str) and plain["format"] not in FORMATS:
        del plain["format"]
    most = _number(plain, "maxItems")
    if plain.get("uniqueItems") is False or (plain.get("uniqueItems") is True and most is not None and most <= 1):
        del plain["uniqueItems"]
    if "propertyNames" not in references and _plain(plain.get("propertyNames"), references) in ANY_NAME:
        del plain["propertyNames"]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(plain.get(exclusive), bool) and plain.pop(exclusive) and bound in plain:
            plain[exclusive] = plain.pop(bound)
    if "oneOf" not in references and "anyOf" not in plain and _exclude_each_other(plain.get("oneOf")):
        plain["anyOf"] = plain.pop("oneOf")
    return plain


def _exclude_each_other(options: Any) -> bool:
    """Whether all options but at most one are schemas of constants, and no constant is valid under two options."""
    if not isinstance(options, list) or not all(type(option) is dict for option in options):
        return False
    constants = set[Any]()
    others: list[dict[str, Any]] = []
    for option in options:
        values = option.get("enum", [option["const"]] if "const" in option else None)
        if values is None:
            others.append(option)
            continue
        if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
            return False
        own_constants = {(isinstance(value, bool), value) for value in values}
        if own_constants & constants:
            return False
        constants |= own_constants
    return not others or (len(others) == 1 and not any(_may_hold(others[0], value) for _, value in constants))


def _may_hold(schema: dict[str, Any], value: Any) -> bool:
    """Whether a string, a number, a truth value or null may be valid under a schema. In doubt it may be."""
    if isinstance(value, str) and schema.get("type") == "string":
        least, most = _number(schema, "minLength"), _number(schema, "maxLength")
        if (least is not None and len(value) < least) or (most is not None and len(value) > most):
            return False
        return not isinstance(schema.get("pattern"), str) or _matches(schema["pattern"], value)
    number = ("integer", "number")
    own_kinds = {str: ("string",), bool: ("boolean",), int: number, float: number, type(None): ("null",)}[type(value)]
    types = schema.get("type", own_kinds)
    return not isinstance(types, str | list | tuple) or any(kind in types for kind in own_kinds)


def _matches(pattern: str, text: str) -> bool:
    """Whether a text matches a pattern in Rust's syntax, whose engine takes little time on any text.

    It is true for a pattern that cannot be read, or that may take long to compile.
    """
    if len(pattern) > MAX_PATTERN or re.search(r"[{\\]", re.sub(r"\\[d\W]", "", pattern)):
        return True
    from pydantic_core import SchemaError  # here: an engine alone, as on a GPU, needs no pydantic

    try:
        return _pattern_validator(pattern).isinstance_python(text)
    except SchemaError:
        return True


@lru_cache(maxsize=256)
def _pattern_validator(pattern: str) -> "SchemaValidator":
    from pydantic_core import SchemaValidator
    from pydantic_core.core_schema import str_schema

    return SchemaValidator(str_schema(pattern=pattern, regex_engine="rust-regex"))


def check_bounds(schema: str) -> None:
    """Raises `GrammarRefused` for bounds that llguidance compiles wrongly, naming their places.

    Numbers: if an exclusive bound is a whole number and the other bound is less than 1 away, it allows the exclusive
    bound's own value. Objects: a name that is written twice counts twice for `minProperties`. This can only happen to
    names that are not required.
    """
    root = json.loads(schema)
    parts: list[tuple[Path, Any]] = [((), root)]
    looks = MAX_LOOKS
    while parts:
        path, part = parts.pop()
        if isinstance(part, list):
            parts += [((*path, str(number)), item) for number, item in enumerate(part)]
        elif isinstance(part, dict):
            parts += [((*path, name), item) for name, item in part.items()]
            for parts_by_id in _joins(root, {}, part):
                looks -= len(parts_by_id)
                if looks < 0:
                    raise GrammarRefused("cannot be honoured: its parts refer to too many others")
                try:
                    _check_properties(list(parts_by_id.values()))
                    if all(other.get("type") != "integer" for other in parts_by_id.values()):
                        _check_number(list(parts_by_id.values()))
                except GrammarRefused as error:
                    raise GrammarRefused(f"cannot be honoured{at(path)}: {error}") from None


Path = tuple[str, ...]


def at(path: Sequence[str]) -> str:
    """A place in a schema, for a sentence."""
    return f" at {'.'.join(path)[:200]}" if path else ""


def inner_schemas(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The schemas directly within a schema, with their paths."""
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name in MAPS and isinstance(value, dict):
            yield from (((name, key), part) for key, part in value.items() if isinstance(part, dict))
        elif name in INNER and isinstance(value, dict):
            yield (name,), value
        elif name in INNER and isinstance(value, list):
            yield from (((name, str(i)), part) for i, part in enumerate(value) if isinstance(part, dict))


def _joins(root: Any, earlier_parts: dict[int, Any], part: dict[str, Any]) -> Iterator[dict[int, Any]]:
    """The parts of a schema that hold for one value, by identity: `earlier_parts`, a part, the target of its
    reference, and one alternative of each."""
    parts, stack = dict(earlier_parts), [part]
    while stack:
        inner = stack.pop()
        if id(inner) in parts:
            continue
        parts[id(inner)] = inner
        stack += _parts(inner, "allOf")
        if isinstance(target := _reference_target(root, inner.get("$ref")), dict):
            stack.append(target)
    yield parts
    for inner in list(parts.values())[len(earlier_parts) :]:
        for option in (*_parts(inner, "anyOf"), *_parts(inner, "oneOf")):
            yield from _joins(root, parts, option)


def _parts(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    parts = part.get(name)
    return [item for item in parts if isinstance(item, dict)] if isinstance(parts, list) else []


def _reference_target(root: Any, reference: Any) -> Any:
    """The target of a reference within the document; `None` for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _check_number(parts: list[dict[str, Any]]) -> None:
    """Raises `GrammarRefused` if the strictest bounds of `parts`, which hold for one value, are less than 1 apart
    and one of them is exclusive and whole."""
    strictest = {
        name: choose((x for part in parts if (x := _number(part, name)) is not None), default=None)
        for name, choose in _BOUNDS.items()
    }
    lowest = [strictest[name] for name in ("exclusiveMinimum", "minimum")]
    highest = [strictest[name] for name in ("exclusiveMaximum", "maximum")]
    lower = max((x for x in lowest if x is not None), default=None)
    upper = min((x for x in highest if x is not None), default=None)
    if lower is None or upper is None or not lower < upper < lower + 1:
        return
    for name, bound, strictest_bound in (("Minimum", lowest[0], lower), ("Maximum", highest[0], upper)):
        if bound == strictest_bound and bound == int(bound):
            raise GrammarRefused(
                f"exclusive{name} {bound} has another bound less than 1 away; give {name.lower()} instead, with a "
                f"number just {'above' if name == 'Minimum' else 'below'} {bound}"
            )


def _check_properties(parts: list[dict[str, Any]]) -> None:
    least = max((x for part in parts if (x := _number(part, "minProperties")) is not None), default=0)
    types = [part["type"] for part in parts if isinstance(part.get("type"), str | list)]
    required = {
        name for part in parts if isinstance(part.get("required"), list) for name in map(str, part["required"])
    }
    if least > len(required) + 1 and all("object" in kinds for kinds in types):
        raise GrammarRefused(
            f"minProperties {least} with {len(required)} required names, because "
            "a name may be written twice; require all but one of them by name"
        )


def _number(part: dict[str, Any], name: str) -> int | float | None:
    value = part.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


class GrammarRefused(ValueError):
    """A grammar that cannot be honoured, with the reason."""
