"""Reads the calls in an answer's growing text: content up to the first call, then one call after the other.

Calls are given in OpenAI's deltas, their arguments as pieces of the text of a JSON object.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mbd_core.calls.argument_readers import argument_reader
from mbd_core.calls.form import ID, ID_LENGTH, CallForm, LiteralArguments, TaggedArguments
from mbd_core.calls.marks import open_length


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """The content and the thoughts in a piece of text, and OpenAI's deltas of calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class CallReader:
    """Reads one answer whose calls have a form; its text is pushed in pieces of any size.

    White space right before the first call (`CallForm.gap`) belongs to neither content nor call: templates add it
    again. Text after the calls is content.
    """

    def __init__(self, form: CallForm, functions: Mapping[str, Mapping[str, Any]], *, text_has_form: bool = False):
        """`functions` holds the JSON schema of each function's arguments.

        With `text_has_form`, an answer that begins with no call of these functions is all text, because a text of a
        JSON schema may begin with the same mark as a call.
        """
        self._form, self._functions = form, functions
        self._buffer = ""
        self._place = "beginning" if text_has_form or not form.mark else "content"
        middle, ends = form.middle.partition(ID)[0], [""] if ID in form.middle else _beginnings(form) or [""]
        self._calls_begin = [f"{form.opening}{name}{middle}{end}" for name in functions for end in ends]
        if not text_has_form:
            self._calls_begin = [form.opening]
        follows = "|".join(re.escape(text) for text in _beginnings(form))
        self._middle = re.compile(_pattern(form.middle) + f"(?={follows})" * bool(follows))
        self._tail = re.compile(_pattern(form.tail))
        self.num_calls = 0

    def push(self, text: str, *, ends: bool) -> TextPiece:
        """The content and calls that `text` made certain; with `ends`, nothing follows."""
        self._buffer += text
        content = ""
        deltas: dict[int, dict[str, Any]] = {}
        while (step := self._step(ends)) is not None:
            text_part, delta = step
            content += text_part
            if delta:
                _merge(deltas.setdefault(self.num_calls - 1, {"index": self.num_calls - 1}), delta)
        return TextPiece(content=content, calls=list(deltas.values()))

    def _step(self, ends: bool) -> tuple[str, dict[str, Any]] | None:
        """Content, and a part of the current call; `None` if more text is needed."""
        if self._place == "beginning":
            return self._begin(ends)
        if self._place in ("text", "rest"):
            return self._give(len(self._buffer))
        if self._place == "content":
            return self._content(ends)
        if self._place == "name":
            return self._name()
        if self._place == "arguments":
            return self._arguments()
        return self._between(ends)

    def _begin(self, ends: bool) -> tuple[str, dict[str, Any]] | None:
        text = self._buffer
        if any(text.startswith(begin) for begin in self._calls_begin):
            self._place, self._buffer = "name", text.removeprefix(self._form.opening)
        elif ends or not any(begin.startswith(text) for begin in self._calls_begin):
            self._place = "text"
        else:
            return None
        return "", {}

    def _content(self, ends: bool) -> tuple[str, dict[str, Any]] | None:
        """Text up to the mark of calls, without the gap before it."""
        form = self._form
        content, mark, tail = self._buffer.partition(form.mark)
        if not mark:
            num_kept = 0 if ends else max(open_length(content, form.mark), open_length(content, form.gap + form.mark))
            return self._give(len(content) - num_kept)
        num_text = len(content.removesuffix(form.gap))
        if num_text:
            return self._give(num_text)
        if (mark + tail).startswith(form.opening):
            self._place, self._buffer = "name", (mark + tail).removeprefix(form.opening)
            return "", {}
        if ends or not form.opening.startswith(mark + tail):  # a mark that no call follows
            return self._give(len(content) + len(mark))
        return None

    def _name(self) -> tuple[str, dict[str, Any]] | None:
        middle = self._middle.search(self._buffer)
        if middle is None:
            return None
        name, self._buffer = self._buffer[: middle.start()], self._buffer[middle.end() :]
        self._place, self.num_calls = "arguments", self.num_calls + 1
        self._reader = argument_reader(self._form.arguments, self._functions.get(name, {}), ends_at=self._form.tail)
        function = {"name": name, "arguments": ""}
        return "", {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

    def _arguments(self) -> tuple[str, dict[str, Any]] | None:
        json_part, length = self._reader.read(self._buffer)
        self._buffer = self._buffer[length:]
        if self._reader.has_ended:
            self._place = "tail"
        elif not length:
            return None
        return "", {"function": {"arguments": json_part}} if json_part else {}

    def _between(self, ends: bool) -> tuple[str, dict[str, Any]] | None:
        """Skips the end of a call, up to the name of the next call or to the end of all calls."""
        form = self._form
        if self._place == "tail":
            tail = self._tail.match(self._buffer)
            if tail is None:
                return None
            self._place, self._buffer = "between", self._buffer[tail.end() :]
            return "", {}
        follows, text = form.between + form.head, self._buffer
        if text.startswith(follows) and follows:
            self._place, self._buffer = ("name", text.removeprefix(follows))
        elif form.end and text.startswith(form.end):
            self._place, self._buffer = "rest", text.removeprefix(form.end)
        elif text and not follows.startswith(text) and not (form.end and form.end.startswith(text)):
            self._place = "rest"
        else:
            return None
        return "", {}

    def _give(self, length: int) -> tuple[str, dict[str, Any]] | None:
        if not length:
            return None
        part, self._buffer = self._buffer[:length], self._buffer[length:]
        return part, {}


def _pattern(text: str) -> str:
    """A regular expression for a constant text, with any id in the place of an id."""
    return re.escape(text).replace(re.escape(ID), f"[a-zA-Z0-9]{{{ID_LENGTH}}}")


def _beginnings(form: CallForm) -> list[str]:
    """The texts that may follow a function's name and `middle`; none for JSON, which `middle` announces."""
    if isinstance(form.arguments, TaggedArguments):
        return [form.arguments.key_begin, form.tail]
    return [form.arguments.begin] if isinstance(form.arguments, LiteralArguments) else []


def _merge(delta: dict[str, Any], addition: dict[str, Any]) -> None:
    if "function" not in delta:
        delta.update(addition)
    else:
        delta["function"]["arguments"] += addition["function"]["arguments"]
