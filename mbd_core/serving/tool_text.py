"""From an answer's text to its calls, as it comes: content up to the first call, then one call after the other."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from mbd_core.checkpoint.tool_turns import ARGUMENTS, BEGIN, END, HEAD, TAIL

OPENING, CLOSING = BEGIN + HEAD, TAIL + END


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a piece of text became: content, and OpenAI's deltas of calls."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class CallReader:
    """Reads one answer that was held to a `CallRule`; its text is pushed in any pieces.

    A line's end right before the first call belongs to neither content nor call: templates put it back.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._place = "content"  # or "name", "arguments", "between"
        self.num_calls = 0

    def push(self, text: str, *, ends: bool) -> Said:
        """What became certain with `text`; `ends`: nothing follows it."""
        self._buffer += text
        content = ""
        deltas: dict[int, dict[str, Any]] = {}
        while (step := self._step(ends)) is not None:
            said, delta = step
            content += said
            if delta:
                _merge(deltas.setdefault(self.num_calls - 1, {"index": self.num_calls - 1}), delta)
        return Said(content=content, calls=list(deltas.values()))

    def _step(self, ends: bool) -> tuple[str, dict[str, Any]] | None:
        """Content, and a part of the current call; `None` where more text is needed."""
        if self._place == "content":
            before, mark, after = self._buffer.partition(BEGIN)
            if mark:
                self._place, self._buffer = "name", mark + after
                return before.removesuffix("\n"), {}
            kept = 0 if ends else max(_open_length(before, BEGIN), _open_length(before, "\n" + BEGIN))
            return self._give(len(before) - kept)
        if self._place == "between":
            if BEGIN not in self._buffer:
                return None
            self._place, self._buffer = "name", self._buffer[self._buffer.index(BEGIN) :]
        if self._place == "name":
            name, mark, after = self._buffer.removeprefix(OPENING).partition(ARGUMENTS)
            if not mark:
                return None
            self._place, self._buffer, self.num_calls = "arguments", after, self.num_calls + 1
            function = {"name": name, "arguments": ""}
            return "", {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        arguments, mark, after = self._buffer.partition(CLOSING)
        if mark:
            self._place, self._buffer = "between", after
            return "", {"function": {"arguments": arguments}}
        kept = _open_length(arguments, CLOSING)
        given, _ = self._give(len(arguments) - kept) or ("", {})
        return ("", {"function": {"arguments": given}}) if given else None

    def _give(self, length: int) -> tuple[str, dict[str, Any]] | None:
        if not length:
            return None
        given, self._buffer = self._buffer[:length], self._buffer[length:]
        return given, {}


def _merge(delta: dict[str, Any], more: dict[str, Any]) -> None:
    if "function" not in delta:
        delta.update(more)
    else:
        delta["function"]["arguments"] += more["function"]["arguments"]


def _open_length(text: str, mark: str) -> int:
    """How many of the last characters may yet grow into `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
