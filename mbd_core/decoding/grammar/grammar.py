"""What the whole text of an answer must match: a JSON schema, a regular expression or a context-free grammar."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from mbd_core.fields import configuration

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

Syntax = Literal["json_schema", "regex", "lark"]
NAMES: dict[Syntax, str] = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
MAX_CHARACTERS = 65_536
MAX_SCHEMAS = 131_072  # characters of the schemas in a grammar, what says nothing to it not counted
MAX_LOOKS = 20_000  # at a schema's parts, those that they refer to included
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose values are schemas by name
INNER = ("items", "additionalProperties", "prefixItems", "allOf", "anyOf", "oneOf")  # a schema, or a list of them
_BOUNDS = {"exclusiveMinimum": max, "minimum": max, "exclusiveMaximum": min, "maximum": min}


MAX_PATTERN = 64  # characters of a pattern that constants are compared with
FORM = ""  # in place of a tool's name
EBNF_RULE = re.compile(r"^\s*[\w.-]+\s*::=", re.MULTILINE)


class GrammarRefused(ValueError):
    """A grammar that cannot be honoured, and why."""


@configuration()
class Grammar:
    """The grammar of one answer. Raises `GrammarRefused` for a text that is empty or too long, and for a JSON schema
    that is no JSON.

    syntax      what `text` is: a JSON schema (as JSON), a regular expression (Rust's syntax), or a grammar in
                llguidance's variant of Lark
    may_be_cut  the answer may also end without an EOS at `max_tokens`, where the grammar accepts the text so far
    schemas     names of tools, and the JSON schemas of their parameters, which `text` has as `%json @NUMBER`; that of
                a text beside calls has the name `FORM`

    A schema is kept as `plain_schema` makes it.
    """

    syntax: Syntax
    """What the text is."""
    text: str
    may_be_cut: bool = False
    schemas: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.text:
            raise GrammarRefused("the grammar is empty; leave it out if any text will do")
        if self.syntax == "json_schema":
            object.__setattr__(self, "text", _plain_text(self.text, self.subject()))
        schemas = tuple((name, _plain_text(schema, self.subject(name))) for name, schema in self.schemas)
        object.__setattr__(self, "schemas", schemas)
        if len(self.text) > MAX_CHARACTERS:
            raise GrammarRefused(
                f"{self.subject()} has {len(self.text)} characters; at most {MAX_CHARACTERS} are taken"
            )
        lengths = {name: len(schema) for name, schema in self.schemas}
        if (whole := sum(lengths.values())) > MAX_SCHEMAS:
            largest = max(lengths.keys() - {FORM}, key=lambda name: lengths[name])
            raise GrammarRefused(
                f"the parameters of {self.num_tools} tools have {whole} characters without their descriptions, those "
                f"of {largest} {lengths[largest]}; at most {MAX_SCHEMAS} are taken, so give fewer or simpler tools"
            )

    @property
    def num_tools(self) -> int:
        return sum(name != FORM for name, _ in self.schemas)

    @property
    def whole(self) -> str:
        """The text with its schemas."""
        if not self.schemas:
            return self.text
        return SCHEMA_PLACE.sub(lambda match: f"%json {self.schemas[int(match[1])][1]}", self.text)

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The JSON schemas, each with what a sentence calls it."""
        own = ((self.subject(), self.text),) if self.syntax == "json_schema" else ()
        return own + tuple((self.subject(name), schema) for name, schema in self.schemas)

    def subject(self, tool: str | None = None) -> str:
        """What a sentence calls the grammar, or the parameters of a tool."""
        if tool == FORM:
            return "the JSON schema of the text"
        if tool is not None:
            return f"the parameters of {tool}"
        return "the tools" if self.schemas else f"the {NAMES[self.syntax]}"


SCHEMA_PLACE = re.compile(r"%json @(\d+)")


def lark_text(grammar: str) -> str:
    """A grammar in llguidance's variant of Lark: itself, or what llguidance makes of one in EBNF (`root ::= ...`).
    Raises `GrammarRefused` for an EBNF that cannot be read."""
    if EBNF_RULE.search(grammar) is None:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the converter's own kind of error for some mistakes
        raise GrammarRefused(f"the EBNF cannot be read: {str(error)[:200]}") from None


# What a schema says to a grammar.

ANNOTATIONS = (
    *("title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"),
    *("contentEncoding", "contentMediaType", "contentSchema", "enumNames", "enumDescriptions", "markdownDescription"),
    *("externalDocs", "xml"),
)
"""Keywords that say nothing of which values are valid."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""Those that llguidance has; the others are left out, as in a validator that does not know them."""


def _plain_text(schema: str, subject: str) -> str:
    try:
        return json.dumps(plain_schema(json.loads(schema)), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"{subject} cannot be read: {error}") from None


def plain_schema(schema: Any) -> Any:
    """The same schema in keywords that llguidance has.

    What says nothing is left out: annotations, names that begin with "x-", formats that llguidance does not have,
    `uniqueItems` where it holds anyway. `oneOf` of constants that exclude each other is `anyOf`. An exclusive bound
    that is `true` or `false`, as older schemas have it, is a number. What a reference points into stays.
    """
    references = set[str]()
    _collect_references(schema, references)
    return _plain(schema, references)


def _collect_references(value: Any, names: set[str]) -> None:
    """The names on the ways of all references in a value."""
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
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(plain.get(exclusive), bool) and plain.pop(exclusive) and bound in plain:
            plain[exclusive] = plain.pop(bound)
    if "oneOf" not in references and "anyOf" not in plain and _exclude_each_other(plain.get("oneOf")):
        plain["anyOf"] = plain.pop("oneOf")
    return plain


def _exclude_each_other(options: Any) -> bool:
    """Whether these are schemas of constants, but for one at most, and no constant is valid under two of them."""
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
    """Whether a string, a number, a truth value or null may be valid under a schema; what cannot be told may be."""
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
    """Whether a text has a match of a pattern in Rust's syntax, whose engine takes no long time on any text; true for
    a pattern that cannot be read, or that may take long to compile."""
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
    """Raises `GrammarRefused` for bounds that llguidance compiles wrongly, and says where they are. Of a number: with
    a whole one that is exclusive, and the other less than 1 away, it takes the exclusive bound itself. Of an object:
    a name that is written twice counts twice for `minProperties`, which can hold only for names beyond the required
    ones."""
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
    """Where in a schema something is, for a sentence."""
    return f" at {'.'.join(path)[:200]}" if path else ""


def inner_schemas(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The schemas directly within one, with their ways."""
    for name, value in schema.items() if isinstance(schema, dict) else ():
        if name in MAPS and isinstance(value, dict):
            yield from (((name, key), part) for key, part in value.items() if isinstance(part, dict))
        elif name in INNER and isinstance(value, dict):
            yield (name,), value
        elif name in INNER and isinstance(value, list):
            yield from (((name, str(i)), part) for i, part in enumerate(value) if isinstance(part, dict))


def _joins(root: Any, earlier_parts: dict[int, Any], part: dict[str, Any]) -> Iterator[dict[int, Any]]:
    """The parts of a schema that hold for one value, by identity: `before`, a part, what it refers to, and one
    alternative of each."""
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
    """What a reference within the document points at; `None` for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _check_number(parts: list[dict[str, Any]]) -> None:
    """Compare the strictest bounds of `joined`, which hold for one value."""
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
                f"exclusive{name} {bound} beside a bound less than 1 away; "
                f"give {name.lower()} and a number beside {bound}"
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
