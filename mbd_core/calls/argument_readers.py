"""Readers of a call's arguments: from their text in a form, in pieces of any size, to the text of a JSON object."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from mbd_core.calls.form import Arguments, JsonArguments, LiteralArguments, TaggedArguments
from mbd_core.calls.kinds import Kind, kind_of, kinds_of, property_schema
from mbd_core.calls.marks import open_length

WORDS = {"True": "true", "False": "false", "None": "null"}


class ArgumentReader(Protocol):
    """has_ended  whether the arguments are whole; `read` may not be called then"""

    has_ended: bool

    def read(self, text: str) -> tuple[str, int]:
        """JSON of the part of `text` that can be read already, and the part's length. The next call gets the rest."""
        ...


def argument_reader(arguments: Arguments, schema: Mapping[str, Any], *, ends_at: str) -> ArgumentReader:
    """A reader of one call's arguments; `schema` is their JSON schema, and `ends_at` the text that follows them."""
    if isinstance(arguments, JsonArguments):
        return _ObjectReader()
    if isinstance(arguments, TaggedArguments):
        return _TaggedReader(arguments, schema, ends_at)
    return _LiteralReader(arguments)


class _ObjectReader:
    """A JSON object as it is, up to its last brace."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self.has_ended = False

    def read(self, text: str) -> tuple[str, int]:
        for end, letter in enumerate(text, start=1):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.has_ended = True
                    return text[:end], end
        return text, len(text)


class _TaggedReader:
    """Arguments between marks. A string is given as it comes, another value whole."""

    def __init__(self, form: TaggedArguments, schema: Mapping[str, Any], ends_at: str) -> None:
        self._form, self._schema, self._ends_at = form, schema, ends_at
        self._num, self._kinds, self._place = 0, frozenset[Kind](), "key"
        self.has_ended = False

    def read(self, text: str) -> tuple[str, int]:
        form = self._form
        if self._place == "key":
            if text.startswith(form.key_begin):
                key, shows, _ = text.removeprefix(form.key_begin).partition(form.key_end)
                if not shows:
                    return "", 0
                return self._begin(key), len(form.key_begin) + len(key) + len(form.key_end)
            if text.startswith(self._ends_at):
                self.has_ended = True
                return "}" if self._num else "{}", 0
            return "", 0
        value, ends, _ = text.partition(form.value_end)
        if self._place == "string":
            if ends:
                self._place = "key"
                return f'{_inside(value)}"', len(value) + len(ends)
            kept = open_length(value, form.value_end)
            return _inside(value[: len(value) - kept]), len(value) - kept
        if not ends:
            return "", 0
        self._place = "key"
        return value_json(value, self._kinds), len(value) + len(ends)

    def _begin(self, key: str) -> str:
        self._kinds = kinds_of(property_schema(self._schema, key), self._schema)
        is_string = self._kinds == {"string"}
        self._place = "string" if is_string else "value"
        start = ", " if self._num else "{"
        self._num += 1
        return f"{start}{_text_json(key)}: " + '"' * is_string


def value_json(text: str, kinds: frozenset[Kind]) -> str:
    """The JSON of a value that a form writes without quotes. `kinds` are the kinds that the value's schema admits.

    A text that is JSON is that value, unless the schema admits strings and not the value's kind. Any other text is a
    string.
    """
    shown = text.strip()
    shown = WORDS.get(shown, shown)
    try:
        value = json.loads(shown, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _text_json(text)
    own = kind_of(value)
    admitted = own in kinds or (own == "integer" and "number" in kinds) or (own == "number" and "integer" in kinds)
    return shown if admitted or "string" not in kinds else _text_json(text)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _text_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _inside(text: str) -> str:
    """The text as characters of a JSON string, without quotes."""
    return _text_json(text)[1:-1]


SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "/": "/"}
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^xuU]))", re.DOTALL)
LONGEST_ESCAPE = 10
WORD = re.compile(r"[^\s\[\]{}(),:=\"']+")


class _LiteralReader:
    """Named values as literals, given as they come.

    `_open` holds the end of each open list and object, outermost first. In an object, a key comes before each value.
    """

    def __init__(self, form: LiteralArguments) -> None:
        self._form = form
        self._open: list[str] = []
        self._quote = ""  # of the open string
        self._is_key = False  # whether a key comes next, or is being read
        self.has_ended = False

    def read(self, text: str) -> tuple[str, int]:
        out, at = "", 0
        while at < len(text) and not self.has_ended:
            part, length = self._quoted(text[at:]) if self._quote else self._step(text[at:])
            if not length:
                break
            out, at = out + part, at + length
        return out, at

    def _step(self, text: str) -> tuple[str, int]:
        """One step outside of strings. Nothing if more text is needed."""
        form, letter = self._form, text[0]
        if not self._open:
            if not text.startswith(form.begin):
                return "", 0
            self._open.append(form.end)
            self._is_key = True
            return "{", len(form.begin)
        for quote in form.quotes:
            if text.startswith(quote):
                self._quote = quote
                return '"', len(quote)
        if any(quote.startswith(text) for quote in form.quotes):
            return "", 0
        if letter.isspace():
            return ("", 1) if len(self._open) == 1 and self._is_key else (" " * (letter == " "), 1)
        if letter == self._open[-1]:
            self._open.pop()
            self.has_ended = not self._open
            self._is_key = False
            return "}" if letter in (form.end, "}") else letter, 1
        if letter in "{[":
            self._open.append({"{": "}", "[": "]"}[letter])
            self._is_key = letter == "{"
            return letter, 1
        if letter == ",":
            self._is_key = self._open[-1] != "]"
            return (", " if self._is_key and len(self._open) == 1 else ","), 1
        if letter in ":=":
            self._is_key = False
            return (": " if len(self._open) == 1 else ":"), 1
        return self._bare(text)

    def _bare(self, text: str) -> tuple[str, int]:
        """A key, a number or a word without quotes, whole."""
        if self._is_key:
            end = next((i for i, letter in enumerate(text) if letter in ":="), None)
            if end is None:
                return "", 0
            return _text_json(text[:end].strip()), end
        match = WORD.match(text)
        if match is None or match.end() == len(text):
            return "", 0
        return WORDS.get(match[0], match[0]), match.end()

    def _quoted(self, text: str) -> tuple[str, int]:
        """Characters of the open string, up to its end."""
        quote = self._quote
        if text.startswith(quote):
            self._quote = ""
            return '"', len(quote)
        if not self._form.escapes:
            inside = text.partition(quote)[0]
            kept = 0 if quote in text else open_length(inside, quote)
            return _inside(inside[: len(inside) - kept]), len(inside) - kept
        if text[0] == "\\":
            return self._escape(text)
        end = next((i for i, letter in enumerate(text) if letter in ("\\", quote)), len(text))
        return _inside(text[:end]), end

    def _escape(self, text: str) -> tuple[str, int]:
        match = ESCAPE.match(text)
        if match is None:
            return ("", 0) if len(text) < LONGEST_ESCAPE else ("\\\\", 1)
        hexadecimal = match[1] or match[3]
        if hexadecimal:
            code = int(hexadecimal, 16)
            if code > sys.maxunicode:  # not a character, so the backslash is itself
                return "\\\\", 1
            return json.dumps(chr(code))[1:-1], match.end()  # a lone surrogate stays an escape, as UTF-8 lacks it
        if match[2]:
            return match[0], match.end()  # as it is: a surrogate pair's halves come one by one, which JSON allows
        return _inside(SIMPLE_ESCAPES.get(match[4], match[4])), match.end()
