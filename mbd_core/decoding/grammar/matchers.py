"""llguidance's matchers of grammars, and refusals of grammars that it does not take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mbd_core.decoding.grammar.grammar import Grammar, Syntax
from mbd_core.decoding.grammar.schemas import ON_A_LINE, GrammarRefused, at, check_bounds, inner_schemas

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_PLACES = 200  # parts of a schema that are compiled by themselves, to find the refused part


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    matcher, reason = _matcher_of(tokenizer, grammar.syntax, grammar.whole)
    if matcher is None:
        for subject, schema in grammar.parts:
            _check_part(tokenizer, subject, schema)
        if grammar.num_tools:
            why = f"their parameters are too many to be followed together ({reason})"
            raise GrammarRefused(f"the {grammar.num_tools} tools cannot be honoured: {why}; give fewer tools")
        raise GrammarRefused(f"{grammar.subject()} cannot be honoured: {reason}")
    for subject, schema in grammar.parts:
        try:
            check_bounds(schema)
        except GrammarRefused as error:
            raise GrammarRefused(f"{subject} {error}") from None
    return matcher


def tool_matchers(tokenizer: LLTokenizer, grammar: Grammar) -> Iterator[LLMatcher]:
    """A matcher for each of a compiled grammar's tools, which takes no other tool."""
    for whole in grammar.wholes_of_one_tool:
        matcher, _ = _matcher_of(tokenizer, grammar.syntax, whole)
        if matcher is not None:
            yield matcher


_REMEDIES = {
    "Unimplemented keys": "leave them out, and check them yourself",
    "look-around": "write the pattern without it, or leave it out and check it yourself",
    "lookarounds": "give ^ and $ only at the pattern's ends",
    "backreferences": "write the pattern without them, or leave it out and check it yourself",
    "Invalid type": "give string, number, integer, boolean, array, object or null, in small letters",
    "type must be": "leave it out for any value",
    "intersection stack level": "a reference leads to itself; give the schema that it stands for",
}
"""Remedies by a part of llguidance's message."""


def _check_part(tokenizer: LLTokenizer, subject: str, schema: str) -> None:
    """Raises `GrammarRefused` for a schema that llguidance refuses, with the place of the smallest refused part."""
    matcher, reason = _matcher_of(tokenizer, "json_schema", schema)
    if matcher is not None:
        return
    root = json.loads(schema)
    shared = {name: root[name] for name in ("$defs", "definitions") if isinstance(root, dict) and name in root}
    path: tuple[str, ...] = ()
    part, tries = root, MAX_PLACES
    while True:
        for way, inner in inner_schemas(part):
            tries -= 1
            if tries < 0:
                break
            found, inner_reason = _matcher_of(tokenizer, "json_schema", json.dumps({**shared, **inner}))
            if found is None:
                part, path, reason = inner, (*path, *way), inner_reason
                break
        else:
            break
        if tries < 0:
            break
    if "coerce_one_of" in reason:
        reason = "oneOf needs alternatives that exclude each other by type or by constants; give anyOf"
    elif "Default retriever" in reason:
        reason = "a reference to another document is not followed; put its schema into $defs"
    else:
        reason += next((f"; {remedy}" for found, remedy in _REMEDIES.items() if found in reason), "")
    raise GrammarRefused(f"{subject} cannot be honoured{at(path)}: {reason}")


def _matcher_of(tokenizer: LLTokenizer, syntax: Syntax, text: str) -> tuple[LLMatcher | None, str]:
    """A matcher of a text, or `None` and the reason why there is none."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        if syntax == "json_schema":
            text = LLMatcher.grammar_from_json_schema(text, overrides=ON_A_LINE)
        elif syntax == "regex":
            text = LLMatcher.grammar_from_regex(text)
        else:
            text = LLMatcher.grammar_from_lark(text)
    except ValueError as error:
        return None, first_line(str(error))
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
    return (None, first_line(matcher.get_error())) if matcher.is_error() else (matcher, "")


def first_line(text: str) -> str:
    """The first line of an error; the last line too, if the first only announces it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if lines[0].endswith(":") and len(lines) > 1:
        lines[0] = f"{lines[0]} {lines[-1].removeprefix('error: ')}"
    return lines[0][:200]


# A step beyond these limits ends in an error instead of seconds of work; a first mask may take half a second.
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 300_000, "step_lexer_fuel": 20_000, "max_lexer_states": 50_000}
