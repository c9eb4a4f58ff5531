"""The grammar of a call's arguments in a form, from the JSON schema of its function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mbd_core.calls.form import Arguments, JsonArguments, LiteralArguments, TaggedArguments
from mbd_core.calls.kinds import MAPS_OF_SHARED, kinds_of, target_of
from mbd_core.decoding.grammar.schemas import ANNOTATIONS, ON_A_LINE, GrammarRefused

OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties", "maxProperties", *MAPS_OF_SHARED))
OF_ARRAYS = frozenset(("type", "items", "minItems", "maxItems"))
PYTHON_STRINGS = ("minLength", "maxLength", "pattern", "format")


class LarkConstants(Protocol):
    """Constant texts in Lark."""

    def __call__(self, text: str) -> str: ...

    def token(self, mark: str) -> str | None: ...


class ArgumentGrammar:
    """The rules of several functions' arguments.

    lines    of the grammar in Lark
    marks    texts that end a string without quotes
    schemas  JSON schemas that they name by number, each with its function's name
    """

    def __init__(self, arguments: Arguments, constants: LarkConstants) -> None:
        self._arguments, self._constants = arguments, constants
        self.lines: list[str] = []
        self.marks: dict[str, None] = {}
        self.schemas: list[tuple[str, Any]] = []
        self._function, self._root = "", dict[str, Any]()
        self._maps = dict[str, Any]()  # the function's shared schemas
        self._named: dict[str, str] = {}  # rules by the reference or the regular expression that they stand for

    def rule(self, function: str, schema: Mapping[str, Any]) -> str:
        """The arguments of a function. Raises `GrammarRefused` for a schema that the form cannot be held to."""
        self._function, self._root = function, dict(schema)
        self._maps = {name: schema[name] for name in MAPS_OF_SHARED if name in schema}
        if self._maps and not _joins_schemas(schema):
            self._maps = {name: _each_closed(schemas) for name, schemas in self._maps.items()}
        self._named = {name: rule for name, rule in self._named.items() if not name.startswith("#")}
        if isinstance(self._arguments, JsonArguments):
            return self._json({**schema, "x-guidance": ON_A_LINE})
        self.schemas.append((function, schema))  # no rule names it: it is checked, so that all forms refuse the same
        if isinstance(self._arguments, TaggedArguments):
            return self._tagged(self._arguments, schema)
        form = self._arguments
        self._check(schema, OF_OBJECTS, "arguments")
        return self._object(form, schema, form.begin, form.end, form.key_end, str)

    def _new(self, text: str, *, flags: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{flags}: {text}")
        return name

    def _json(self, schema: Any) -> str:
        """A value as JSON, under a schema that may refer to its function's shared schemas."""
        if isinstance(schema, Mapping):
            whole = {**_closed(schema), **self._maps}
        else:  # true takes every value, false none
            whole = self._maps if schema else {**self._maps, "not": {}}
        self.schemas.append((self._function, {"x-guidance": ON_A_LINE, **whole}))
        return f"%json @{len(self.schemas) - 1}"

    def _check(self, schema: Mapping[str, Any], known: frozenset[str], what: str) -> None:
        """Raises `GrammarRefused` for a keyword that rules of this form cannot follow."""
        unknown = sorted(name for name in schema.keys() - known - set(ANNOTATIONS) if not name.startswith("x-"))
        if unknown:
            raise GrammarRefused(
                f"the parameters of {self._function} cannot be honoured: no grammar holds {what} to {unknown[0]} in "
                f"this model's form of calls; leave {unknown[0]} out, and check the arguments yourself"
            )

    # Arguments between marks.

    def _tagged(self, form: TaggedArguments, schema: Mapping[str, Any]) -> str:
        self._check(schema, OF_OBJECTS, "arguments")
        required, parts = schema.get("required", ()), []
        for name, part in self._properties(schema):
            text = f"{self._constants(form.key_begin + name + form.key_end)} {self._shown(form, part)}"
            parts.append(text if name in required else f"({text})?")
        if (other := self._other(schema)) is not None:
            key = f"{self._constants(form.key_begin)} /[^<>=\\s]+/ {self._constants(form.key_end)}"
            self.marks[form.key_end] = None
            parts.append(f"({key} {self._shown(form, other)})*")
        return self._new(" ".join(parts) or '""')

    def _properties(self, schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
        if schema.get("maxProperties") == 0:
            return []
        if "maxProperties" in schema:
            self._check(schema, OF_OBJECTS - {"maxProperties"}, "objects")
        return list((schema.get("properties") or {}).items())

    def _other(self, schema: Mapping[str, Any]) -> Any | None:
        """The schema of properties that `schema` does not name; `None` if it allows none, by the rule of `_closed`."""
        other = schema.get("additionalProperties", "properties" not in schema)
        if other is False or schema.get("maxProperties") == 0:
            return None
        return {} if other is True else other

    def _shown(self, form: TaggedArguments, schema: Any) -> str:
        """A value and the mark at its end."""
        kinds = kinds_of(schema, self._root)
        if "string" in kinds and (constants := self._constant_texts(schema)) is None:
            return self._raw(self._string_regex(schema) if kinds == {"string"} else ANY, form.value_end)
        if "string" in kinds:
            assert constants is not None
            shown = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in constants)
            return f"({' | '.join(map(self._constants, shown))}) {self._constants(form.value_end)}"
        return f"{self._json(schema)} {self._constants(form.value_end)}"

    def _constant_texts(self, schema: Any) -> list[Any] | None:
        """The values of a schema that lists them."""
        schema = target_of(schema, self._root)
        if not isinstance(schema, Mapping):
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return list(schema["enum"])
        options = schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(options, list):
            return None
        values = [self._constant_texts(option) for option in options]
        return None if None in values else [value for part in values for value in part or ()]

    def _raw(self, regex: str, mark: str) -> str:
        """Any text that matches, up to a mark."""
        key = f"{regex} {mark}"
        self.marks[mark] = None
        if key not in self._named:
            spelled = self._new(f"{regex} {json.dumps(mark)}", flags="[lazy]")
            first = re.match(r"<[^<>\s]+>", mark)
            token = None if first is None else self._constants.token(first[0])
            if token is None:
                self._named[key] = spelled
            else:
                terminal = f"T{len(self.lines)}"
                self.lines.append(f"{terminal}: {regex}")
                rest = self._constants(mark[len(first[0]) :]) if first is not None else ""
                self._named[key] = self._new(f"{spelled} | {terminal} {token} {rest}")
        return self._named[key]

    def _string_regex(self, schema: Any) -> str:
        """The regular expression of a string without quotes. A format is an annotation here."""
        schema = target_of(schema, self._root)
        if not isinstance(schema, Mapping):
            return ANY
        parts = []
        if "minLength" in schema or "maxLength" in schema:
            parts.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        if isinstance(pattern := schema.get("pattern"), str):
            parts.append("/" + _anywhere(pattern).replace("/", r"\/") + "/")
        return f"({' & '.join(parts)})" if len(parts) > 1 else parts[0] if parts else ANY

    # Literals.

    def _object(
        self,
        form: LiteralArguments,
        schema: Mapping[str, Any],
        begin: str,
        end: str,
        key_end: str,
        key: Callable[[str], str],
    ) -> str:
        """An object's properties in their order: a required property once, another property at most once."""
        required, separator = schema.get("required", ()), self._constants(form.separator)
        properties = form.ordered(dict(self._properties(schema)))
        items = [
            (f"{self._constants(key(name) + key_end)} {self._value(form, part)}", name in required)
            for name, part in properties
        ]
        first, later = '""', '""'  # rules for the items that remain: if no item is written yet, and after an item
        if (other := self._other(schema)) is not None:
            own_key = self._string(form) if form.quotes_keys and key is not str else "/[a-zA-Z_][a-zA-Z0-9_]*/"
            item = f"{own_key} {self._constants(key_end)} {self._value(form, other)}"
            later = self._new(f"({separator} {item})*")
            first = self._new(f'{item} {later} | ""')
        for item, is_required in reversed(items):
            first = self._new(f"{item} {later}" + ("" if is_required else f" | {first}"))
            later = self._new(f"{separator} {item} {later}" + ("" if is_required else f" | {later}"))
        return self._new(f"{self._constants(begin)} {first} {self._constants(end)}")

    def _value(self, form: LiteralArguments, schema: Any) -> str:
        """A value as a literal."""
        if not isinstance(schema, Mapping):
            return self._any(form) if schema else self._json(schema)
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._named:
                name = self._named[reference] = f"r{len(self.lines)}"
                self.lines.append("")  # the place of a rule that may lead to itself
                target = self._value(form, target_of(schema, self._root))
                self.lines[int(name[1:])] = f"{name}: {target}"
            return self._named[reference]
        constants = self._constant_texts(schema)
        if constants is not None:
            texts = [t for value in constants for t in self._literals(form, value)]
            return f"({' | '.join(map(self._constants, texts))})"
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                self._check(schema, frozenset((keyword, "type", *MAPS_OF_SHARED)), "values")
                return f"({' | '.join(self._value(form, part) for part in schema[keyword])})"
        kinds = schema.get("type")
        if kinds is None:
            if "properties" in schema or "items" in schema:
                return self._value(form, {**schema, "type": "object" if "properties" in schema else "array"})
            self._check(schema, frozenset(MAPS_OF_SHARED), "values")
            return self._any(form)
        if isinstance(kinds, list):
            return f"({' | '.join(self._of_kind(form, schema, kind) for kind in kinds)})"
        return self._of_kind(form, schema, kinds)

    def _literals(self, form: LiteralArguments, value: Any) -> list[str]:
        return (
            [form.string(value, quote) for quote in form.quotes] if isinstance(value, str) else [form.literal(value)]
        )

    def _of_kind(self, form: LiteralArguments, schema: Mapping[str, Any], kind: str) -> str:
        if kind == "boolean":
            return f"({self._constants(form.words[True])} | {self._constants(form.words[False])})"
        if kind == "null":
            return self._constants(form.words[None])
        if kind == "string":
            return self._string(form, schema)
        if kind == "array":
            self._check(schema, OF_ARRAYS | OF_OBJECTS, "lists")
            item = self._value(form, schema.get("items", {}))
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            if most == 0:
                return '"[]"'
            others = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}" if least > 1 or most else "*"
            rule = self._new(f"{item} ({self._constants(form.separator)} {item}){others}")
            return f'"[" {rule} "]"' if least else f'"[" {rule}? "]"'
        if kind == "object":
            self._check(schema, OF_OBJECTS | OF_ARRAYS, "objects")
            return self._object(form, schema, "{", "}", form.inner_key_end, form.key)
        return self._json({**schema, "type": kind})

    def _string(self, form: LiteralArguments, schema: Mapping[str, Any] | None = None) -> str:
        """A string in one of the form's quotes. If it has a pattern or a length, it has JSON's quotes if possible."""
        limited = schema is not None and any(keyword in schema for keyword in PYTHON_STRINGS)
        if not form.escapes:
            regex = self._string_regex(schema) if limited else ANY
            return f"{self._constants(form.quotes[0])} {self._raw(regex, form.quotes[0])}"
        if limited and schema is not None:
            return self._limited(form, schema)
        if "string" not in self._named:
            options = (rf"{q}([^{q}\\\n\r]|\\[\\'\"nrtbf]|\\u[0-9a-fA-F]{{4}})*{q}" for q in form.quotes)
            self._named["string"] = f"S{len(self.lines)}"
            self.lines.append(f"{self._named['string']}: " + " | ".join(f"/{option}/" for option in options))
        return self._named["string"]

    def _limited(self, form: LiteralArguments, schema: Mapping[str, Any]) -> str:
        """A string with a pattern, a length or a format: as JSON, or without escapes in another quote."""
        options = [self._json(schema)]
        for quote in form.quotes if "format" not in schema else ():
            if quote != '"':
                terminal = f"T{len(self.lines)}"
                self.lines.append(f"{terminal}: {self._string_regex(schema)} & /[^{quote}\\\\\\n\\r]*/")
                options.append(f"{json.dumps(quote)} {terminal} {json.dumps(quote)}")
        return f"({' | '.join(options)})"

    def _any(self, form: LiteralArguments) -> str:
        """Any value as a literal."""
        if "any" not in self._named:
            name = self._named["any"] = f"r{len(self.lines)}"
            self.lines.append("")
            kinds = ("string", "number", "boolean", "null", "array", "object")
            options = [self._of_kind(form, {}, kind) for kind in kinds]
            self.lines[int(name[1:])] = f"{name}: {' | '.join(options)}"
        return self._named["any"]


ANY = "/(?s:.*)/"


def _closed(schema: Any) -> Any:
    """The schema, in which objects with named properties allow no other properties: the model would make up their
    names, and no function takes them.

    An object with a keyword of `OPENING` stays as it is, and so do alternatives beside another part of their object.
    """
    if not isinstance(schema, Mapping):
        return schema
    kept = dict(schema)
    for keyword in ("items", "additionalProperties"):
        if keyword in kept:
            kept[keyword] = _closed(kept[keyword])
    if isinstance(kept.get("properties"), Mapping):
        kept["properties"] = _each_closed(kept["properties"])
        if kept.keys().isdisjoint(OPENING):
            kept["additionalProperties"] = False
    for keyword in ("anyOf", "oneOf"):
        if isinstance(kept.get(keyword), list) and not _joins(kept):
            kept[keyword] = [_closed(part) for part in kept[keyword]]
    return kept


def _each_closed(schemas: Any) -> Any:
    return {name: _closed(part) for name, part in schemas.items()} if isinstance(schemas, Mapping) else schemas


OPENING = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref")
)
"""Keywords beside `properties` by which an object may have more properties."""
PARTS = frozenset(("properties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"))
"""Keywords of which two together describe parts of one object."""


def _joins(schema: Mapping[str, Any]) -> bool:
    """Whether a schema describes one object in several parts, each of which allows the others' properties."""
    whole = schema.get("allOf")
    return len(schema.keys() & PARTS) > 1 or (isinstance(whole, list) and len(whole) > 1)


def _joins_schemas(value: Any) -> bool:
    """Whether any schema within `value` describes one object in several parts."""
    if isinstance(value, Mapping):
        return _joins(value) or any(map(_joins_schemas, value.values()))
    return isinstance(value, list) and any(map(_joins_schemas, value))


def _anywhere(pattern: str) -> str:
    """A regular expression for a whole text in which a pattern of JSON Schema is found."""
    starts, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if ends else inner
    return ("" if starts else "(?s:.*)") + f"(?:{inner})" + ("" if ends else "(?s:.*)")
