"""What the whole text of an answer must match: a JSON schema, a regular expression or a context-free grammar."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from mbd_core.options import Option, check

Syntax = Literal["json_schema", "regex", "lark"]
NAMES: dict[Syntax, str] = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
MAX_CHARACTERS = 65_536
MAX_LOOKS = 20_000  # at a schema's parts, those that they refer to included
_BOUNDS = {"exclusiveMinimum": max, "minimum": max, "exclusiveMaximum": min, "maximum": min}


class GrammarRefused(ValueError):
    """A grammar that cannot be honoured, and why."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The grammar of one answer. Raises `GrammarRefused` for a text that is empty or too long.

    syntax      what `text` is: a JSON schema (as JSON), a regular expression (Rust's syntax), or a grammar in
                llguidance's variant of Lark
    may_be_cut  the answer may also end without an EOS at `max_tokens`, where the grammar accepts the text so far
    """

    syntax: Annotated[Syntax, Option("What the text is.")]
    text: str
    may_be_cut: bool = False

    def __post_init__(self) -> None:
        check(self)
        if not self.text:
            raise GrammarRefused("the grammar is empty; leave it out if any text will do")
        if len(self.text) > MAX_CHARACTERS:
            raise GrammarRefused(f"the grammar has {len(self.text)} characters; at most {MAX_CHARACTERS} are taken")


def check_bounds(schema: str) -> None:
    """Raises `GrammarRefused` for bounds of a number that llguidance compiles wrongly: with a whole one that is
    exclusive, and the other less than 1 away, it takes the exclusive bound itself."""
    root = json.loads(schema)
    parts: list[Any] = [root]
    looks = MAX_LOOKS
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
            for joined in _joins(root, {}, part):
                looks -= len(joined)
                if looks < 0:
                    raise GrammarRefused("the JSON schema cannot be honoured: its parts refer to too many others")
                if all(other.get("type") != "integer" for other in joined.values()):
                    _check_number(list(joined.values()))


def _joins(root: Any, before: dict[int, Any], part: dict[str, Any]) -> Iterator[dict[int, Any]]:
    """The parts of a schema that hold for one value, by identity: `before`, a part, what it refers to, and one
    alternative of each."""
    joined, left = dict(before), [part]
    while left:
        inner = left.pop()
        if id(inner) in joined:
            continue
        joined[id(inner)] = inner
        left += _parts(inner, "allOf")
        if isinstance(referred := _referred(root, inner.get("$ref")), dict):
            left.append(referred)
    yield joined
    for inner in list(joined.values())[len(before) :]:
        for option in (*_parts(inner, "anyOf"), *_parts(inner, "oneOf")):
            yield from _joins(root, joined, option)


def _parts(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    listed = part.get(name)
    return [other for other in listed if isinstance(other, dict)] if isinstance(listed, list) else []


def _referred(root: Any, reference: Any) -> Any:
    """What a reference within the document points at; `None` for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _check_number(joined: list[dict[str, Any]]) -> None:
    """Compare the strictest bounds of `joined`, which hold for one value."""
    strictest = {
        name: choose((x for part in joined if (x := _number(part, name)) is not None), default=None)
        for name, choose in _BOUNDS.items()
    }
    lowest = [strictest[name] for name in ("exclusiveMinimum", "minimum")]
    highest = [strictest[name] for name in ("exclusiveMaximum", "maximum")]
    lower = max((x for x in lowest if x is not None), default=None)
    upper = min((x for x in highest if x is not None), default=None)
    if lower is None or upper is None or not lower < upper < lower + 1:
        return
    for name, bound, binding in (("Minimum", lowest[0], lower), ("Maximum", highest[0], upper)):
        if bound == binding and bound == int(bound):
            raise GrammarRefused(
                f"the JSON schema cannot be honoured: exclusive{name} {bound} beside a bound less than 1 away; "
                f"give {name.lower()} and a number beside {bound}"
            )


def _number(part: dict[str, Any], name: str) -> int | float | None:
    value = part.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
