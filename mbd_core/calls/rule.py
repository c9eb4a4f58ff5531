"""The rule for an answer's calls, and the grammar of such answers in a form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mbd_core.calls.argument_grammar import ArgumentGrammar
from mbd_core.calls.form import ID, ID_LENGTH, CallForm
from mbd_core.decoding.grammar.grammar import FORM, TOOLS_RULE, Grammar
from mbd_core.decoding.grammar.schemas import ON_A_LINE

ANY = "/(?s:.*)/"


@dataclass(frozen=True, kw_only=True)
class CallRule:
    """The calls that an answer may have.

    functions    names of functions, and the JSON schemas of their arguments
    must         whether the answer must be a call; otherwise it is text, which calls may follow
    several      whether several calls may follow one another, if the form supports it
    text_schema  the JSON schema of an answer without a call
    """

    functions: tuple[tuple[str, Mapping[str, Any]], ...]
    must: bool
    several: bool
    text_schema: Mapping[str, Any] | None = None

    def grammar(self, form: CallForm, vocabulary: Mapping[str, int]) -> Grammar:
        """The grammar of such answers; `vocabulary` says which marks are tokens of their own. Raises `GrammarRefused`.

        Text ends where a call begins, whether the call's mark is a token or is spelled. The budget may cut a text, but
        not a call. Text of a JSON schema has no call after it and is not cut either.
        """
        constants = Constants(vocabulary)
        arguments = ArgumentGrammar(form.arguments, constants)
        functions = [
            f"{self._with_id(name + form.middle, constants)} {arguments.rule(name, schema)}"
            for name, schema in self.functions
        ]
        others = f" ({constants(form.between + form.head)} function)*" if self.several and form.several else ""
        lines = [
            f"calls: function{others} {constants(form.end)}",
            f"function: {TOOLS_RULE} {self._with_id(form.tail, constants)}",
            f"{TOOLS_RULE}: " + " | ".join(f"f{i}" for i in range(len(functions))),
            *(f"f{i}: {text}" for i, text in enumerate(functions)),
            *arguments.lines,
        ]
        schemas = list(arguments.schemas)
        if self.must:
            lines.insert(0, f"start: {constants(form.opening)} calls")
        elif self.text_schema is not None:
            lines[:0] = [f"start: form | {constants(form.opening)} calls", f"form: %json @{len(schemas)}"]
            schemas.append((FORM, {**self.text_schema, "x-guidance": ON_A_LINE}))
        else:
            lines[:0] = self._with_text(form, constants)
        return Grammar(
            syntax="lark",
            text="\n".join(lines),
            may_be_cut=not self.must and self.text_schema is None,
            schemas=tuple((name, json.dumps(schema)) for name, schema in schemas),
            marks=tuple(arguments.marks),
        )

    def _with_text(self, form: CallForm, constants: Constants) -> list[str]:
        """The beginning of the grammar of answers that are text, calls, or text with calls after it."""
        if not form.mark:
            return [f"start: TEXT | {constants(form.opening)} calls", f"TEXT: {without_beginning(form.opening)}"]
        rest, token = constants(form.opening.removeprefix(form.mark)), constants.token(form.mark)
        spelled, before = f"spelled[lazy]: {ANY} {json.dumps(form.mark)}", "TEXT "
        text = ANY
        if not form.text_before:
            spelled, before = f"spelled: {json.dumps(form.mark)}", ""
            text = f"{ANY} & ~/(?s:.*){regex_of(form.mark)}(?s:.*)/"
        head = "head: spelled" if token is None else f"head: spelled | {before}{token}"
        return [f"start: TEXT | head {rest} calls", head, spelled, f"TEXT: {text}"]

    def _with_id(self, text: str, constants: Constants) -> str:
        """The grammar of a constant text, in which an id may have a place."""
        before, place, after = text.partition(ID)
        if not place:
            return constants(text)
        return f"{constants(before)} /[a-zA-Z0-9]{{{ID_LENGTH}}}/ {constants(after)}"


MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")


class Constants:
    """Constant texts in Lark, where marks that are tokens of their own are written as these tokens."""

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self._vocabulary = vocabulary

    def token(self, mark: str) -> str | None:
        """A mark's own token, if it has one."""
        return f"<[{self._vocabulary[mark]}]>" if mark in self._vocabulary else None

    def __call__(self, text: str) -> str:
        """The constant; an empty text is an empty string of Lark."""
        parts, start = [], 0
        for match in MARK.finditer(text):
            if (token := self.token(match[0])) is not None:
                parts += [json.dumps(text[start : match.start()])] * (match.start() > start) + [token]
                start = match.end()
        if start < len(text) or not parts:
            parts.append(json.dumps(text[start:]))
        return " ".join(parts)


def without_beginning(beginning: str) -> str:
    """A regular expression for all texts that do not begin with `beginning`."""
    options = [""]
    for number, letter in enumerate(beginning):
        options.append(f"{regex_of(beginning[:number])}[^{regex_of(letter)}](?s:.*)")
        options += [regex_of(beginning[: number + 1])] * (number + 1 < len(beginning))
    return f"/{'|'.join(options)}/"


def regex_of(text: str) -> str:
    """A text as a regular expression in Lark."""
    return "".join("\\" + letter if letter in SPECIAL else letter for letter in text).replace("\n", "\\n")


SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/")
"""Characters that mean something in a regular expression."""
