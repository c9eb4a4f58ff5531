"""What the whole text of an answer must match: a JSON schema, a regular expression or a context-free grammar."""

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mbd_core.decoding.checks import check_choice

Syntax = Literal["json_schema", "regex", "lark"]
NAMES: dict[Syntax, str] = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
MAX_CHARACTERS = 65_536


class GrammarRefused(ValueError):
    """A grammar that cannot be honoured, and why."""


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """The grammar of one answer. Raises `GrammarRefused` for a text that is empty or too long.

    syntax      what `text` is: a JSON schema (as JSON), a regular expression (Rust's syntax), or a grammar in
                llguidance's variant of Lark
    may_be_cut  the answer may also end without an EOS at `max_tokens`, where the grammar accepts the text so far
    """

    syntax: Syntax
    text: str
    may_be_cut: bool = False

    def __post_init__(self) -> None:
        check_choice("grammar.", "syntax", self.syntax, get_args(Syntax))
        if not self.text:
            raise GrammarRefused("the grammar is empty; leave it out if any text will do")
        if len(self.text) > MAX_CHARACTERS:
            raise GrammarRefused(f"the grammar has {len(self.text)} characters; at most {MAX_CHARACTERS} are taken")


def check_bounds(schema: str) -> None:
    """Raises `GrammarRefused` for bounds of a number that llguidance compiles wrongly: with a whole one that is
    exclusive, and the other less than 1 away, it takes the exclusive bound itself."""
    parts: list[Any] = [json.loads(schema)]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") != "integer":
                _check_number(part)
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _check_number(part: dict[str, Any]) -> None:
    lowest = [_number(part, name) for name in ("exclusiveMinimum", "minimum")]
    highest = [_number(part, name) for name in ("exclusiveMaximum", "maximum")]
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
