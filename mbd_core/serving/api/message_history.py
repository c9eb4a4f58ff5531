"""Turns of a request of `/v1/messages` become messages of a chat."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from mbd_core.serving.api.message_fields import (
    Block,
    InputTurn,
    OtherBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

MOST_NOTES = 8  # notes on blocks of one request
ERROR = "Error: "  # before the result of a call that failed: chat templates have no place for `is_error`


@dataclass
class History:
    """A chat's messages.

    places  the field of the request from which each message comes
    notes   notes on blocks that are left out
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, system: str | Sequence[TextBlock] | None, turns: Sequence[InputTurn]) -> "History":
        """A system message, if there is a system text, and the turns."""
        history = cls()
        if isinstance(system, str) or system:
            parts = [TextBlock(type="text", text=system)] if isinstance(system, str) else system
            history._add("system", role="system", content=_parts(parts))
        numbered = enumerate(turns)
        for role, group in groupby(numbered, key=lambda item: item[1].role):
            own = list(group)
            blocks = [block for number, turn in own for block in history._blocks(number, turn)]
            history._add_turn(role, blocks, place=f"messages.{own[0][0]}")
        if len(history.notes) > MOST_NOTES:
            more = len(history.notes) - MOST_NOTES
            history.notes[MOST_NOTES:] = [f"{more} more blocks of messages are left out"]
        return history

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message, a text of the assistant."""
        last = self.messages[-1]
        return last["role"] == "assistant" and "tool_calls" not in last

    def _blocks(self, number: int, turn: InputTurn) -> list[tuple[str, Block]]:
        """The blocks of a turn that are read, each with its field."""
        place = f"messages.{number}"
        if isinstance(turn.content, str):
            return [(place, TextBlock(type="text", text=turn.content))]
        blocks: list[tuple[str, Block]] = [(f"{place}.content.{i}", block) for i, block in enumerate(turn.content)]
        self._note(blocks)
        return [(at, block) for at, block in blocks if not isinstance(block, OtherBlock)]

    def _note(self, blocks: Sequence[tuple[str, Block]]) -> None:
        for place, block in blocks:
            if isinstance(block, OtherBlock):
                self.notes.append(f"{place} is left out: a block of type {block.type} has no place here")

    def _add_turn(self, role: str, blocks: Sequence[tuple[str, Block]], *, place: str) -> None:
        """Add the messages of one turn: its calls' results first, as chat templates want them."""
        texts = [block for _, block in blocks if isinstance(block, TextBlock)]
        for at, block in blocks:
            if isinstance(block, ToolResultBlock):
                self._add(at, role="tool", tool_call_id=block.tool_use_id, content=self._result(at, block))
        if role == "assistant":
            thoughts = "".join(block.thinking for _, block in blocks if isinstance(block, ThinkingBlock))
            calls = [_call(block) for _, block in blocks if isinstance(block, ToolUseBlock)]
            more = {"tool_calls": calls} if calls else {}
            self._add(place, role=role, content=_parts(texts), reasoning=thoughts or None, **more)
        elif texts or not blocks or role == "system":
            self._add(place, role=role, content=_parts(texts))

    def _result(self, place: str, block: ToolResultBlock) -> list[dict[str, str]]:
        content = block.content or ""
        parts = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        if not isinstance(content, str):
            self._note([(f"{place}.content.{i}", part) for i, part in enumerate(content)])
        error = [TextBlock(type="text", text=ERROR)] if block.is_error else []
        return _parts([*error, *(part for part in parts if isinstance(part, TextBlock))])

    def _add(self, place: str, **message: Any) -> None:
        self.messages.append(message)
        self.places.append(place)


def _parts(blocks: Sequence[TextBlock]) -> list[dict[str, str]]:
    return [{"type": "text", "text": block.text} for block in blocks]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}
