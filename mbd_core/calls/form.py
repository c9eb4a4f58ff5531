"""A form of calls: the text in which an answer calls functions, as data.

    text | gap | begin | head NAME middle ARGUMENTS tail | between | head NAME middle ARGUMENTS tail | end

Grammars, the reader of streams, and histories of templates without tools are made from a form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ID = "\ufdd0"
"""The place of a call's id in a form: `ID_LENGTH` letters and digits."""
ID_LENGTH = 9
JSON_WORDS = {True: "true", False: "false", None: "null"}


@dataclass(frozen=True)
class JsonArguments:
    """A JSON object."""

    def written(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class TaggedArguments:
    """Each argument as `key_begin` KEY `key_end` VALUE `value_end`: a string as it is, another value as JSON."""

    key_begin: str
    key_end: str
    value_end: str

    def written(self, arguments: Mapping[str, Any]) -> str:
        return "".join(
            f"{self.key_begin}{name}{self.key_end}{self._value(value)}{self.value_end}"
            for name, value in arguments.items()
        )

    def _value(self, value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class LiteralArguments:
    """Named values as literals of a language: `begin` KEY `key_end` VALUE `separator` KEY `key_end` VALUE `end`.

    quotes         the marks around a string; the first is written, all are read
    escapes        whether strings have escapes (`\\n`); otherwise every character stands for itself
    words          the words for true, false and null
    inner_key_end  `key_end` of objects within a value
    quotes_keys    whether keys of objects within a value are quoted
    sorted_keys    whether keys are sorted, case ignored
    """

    begin: str
    end: str
    key_end: str
    separator: str
    quotes: tuple[str, ...]
    escapes: bool
    inner_key_end: str
    quotes_keys: bool
    words: Mapping[bool | None, str] = field(default_factory=lambda: JSON_WORDS)
    sorted_keys: bool = False

    def written(self, arguments: Mapping[str, Any]) -> str:
        items = [f"{name}{self.key_end}{self.literal(value)}" for name, value in self.ordered(arguments)]
        return self.begin + self.separator.join(items) + self.end

    def ordered(self, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The items in the order in which they are written."""
        return sorted(values.items(), key=lambda item: item[0].lower()) if self.sorted_keys else list(values.items())

    def literal(self, value: Any) -> str:
        """A value of JSON as a literal."""
        if value is None or isinstance(value, bool):
            return self.words[value]
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, Mapping):
            items = [f"{self.key(name)}{self.inner_key_end}{self.literal(v)}" for name, v in self.ordered(value)]
            return "{" + self.separator.join(items) + "}"
        if isinstance(value, Sequence):
            return "[" + self.separator.join(map(self.literal, value)) + "]"
        return json.dumps(value)

    def key(self, name: str) -> str:
        """A key of an object within a value."""
        return self.string(name) if self.quotes_keys else name

    def string(self, text: str, quote: str | None = None) -> str:
        quote = quote or self.quotes[0]
        if not self.escapes:
            return quote + text + quote
        inside = json.dumps(text, ensure_ascii=False)[1:-1]
        if quote != '"':
            inside = inside.replace('\\"', '"').replace(quote, "\\" + quote)
        return quote + inside + quote


Arguments = JsonArguments | TaggedArguments | LiteralArguments


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a chat template shows calls.

    name         the form's name in options
    mark         the first mark of an answer's calls, which ends its text; empty: an answer with calls has no text, and
                 begins with `opening`
    text_before  whether text may stand before calls
    gap          white space between a text and the calls after it, which is part of neither
    several      whether an answer may have several calls
    json_text    whether a template takes arguments as the text of a JSON object
    null_text    whether a template needs null as the content of a turn with calls and without text
    """

    name: str
    arguments: Arguments
    mark: str
    head: str
    middle: str = ""
    tail: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    gap: str = "\n"
    several: bool = True
    text_before: bool = True
    json_text: bool = False
    null_text: bool = False

    @property
    def opening(self) -> str:
        """The text from the beginning of an answer's calls to the first function's name."""
        return self.begin + self.head

    @property
    def has_ids(self) -> bool:
        return ID in self.middle + self.tail

    @property
    def example(self) -> str:
        """A call for a model that does not know the form."""
        shape = "{...}" if isinstance(self.arguments, JsonArguments) else self.arguments.written({"argument": "value"})
        text = f"{self.opening}the function{self.middle}{shape}{self.tail}{self.end}"
        return text.replace(ID, "0" * ID_LENGTH)

    def call(self, name: str, arguments: Mapping[str, Any], *, call_id: str = "") -> str:
        """The text of one call."""
        # arguments may hold the character of `ID`: masked texts have such characters
        middle, tail = (part.replace(ID, call_id) for part in (self.middle, self.tail))
        return f"{self.head}{name}{middle}{self.arguments.written(arguments)}{tail}"

    def calls(self, calls: Sequence[tuple[str, Mapping[str, Any]]], *, ids: Sequence[str] = ()) -> str:
        """The text of an answer's calls, each given by its function's name and its arguments."""
        ids = ids or [""] * len(calls)
        texts = [self.call(name, args, call_id=call_id) for (name, args), call_id in zip(calls, ids, strict=True)]
        return self.begin + self.between.join(texts) + self.end
