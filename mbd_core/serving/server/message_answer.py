"""A chat's answer in the form of Anthropic's Messages: one object, or events in the order of Anthropic's API."""

import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.message_shapes import AnswerBlock, Message, MessageUsage, StopReason
from mbd_core.serving.api.messages import MessagesRequest
from mbd_core.serving.server.answer import ServedAnswer
from mbd_core.serving.server.call_input import call_input

SIGNATURE = "unsigned"  # of thoughts: some clients drop thoughts without a signature
REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "pause_turn",
}
BlockKind = Literal["text", "thinking", "tool_use"]
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""For each kind of block: the type of its deltas, and their member that holds the text."""


class MessageAnswer:
    """The answer to a `MessagesRequest`, made from the chat's `answer`; the caller must `close()` it."""

    def __init__(self, request: MessagesRequest, answer: ServedAnswer, *, request_id: str | None = None) -> None:
        """`request_id` stands in the error of a stream that fails."""
        self._answer, self.streamed, self._request_id = answer, bool(request.stream), request_id
        thinking = request.thinking
        self._builder = MessageBuilder(request.model, shows_thoughts=thinking is None or thinking.display != "omitted")

    def close(self) -> None:
        """Aborts the unfinished request."""
        self._answer.close()

    async def whole(self) -> Message:
        """The whole answer in one object: the pieces of the stream, put together."""
        async for chunks in self._answer.chunks():
            for _ in self._builder.take(chunks):
                pass
        for _ in self._builder.end():
            pass
        return self._builder.message

    async def event_groups(self, on_failure: Callable[[Exception], ApiError]) -> AsyncIterator[list[str]]:
        """The answer as server-sent events, grouped by step; a failure becomes the last event."""
        try:
            async for chunks in self._answer.chunks():
                yield list(map(_event, self._builder.take(chunks)))
            yield list(map(_event, self._builder.end()))
        except Exception as error:
            yield [_event(on_failure(error).message_body(self._request_id))]


def _event(value: Mapping[str, Any]) -> str:
    return f"event: {value['type']}\ndata: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


class MessageBuilder:
    """Turns a chat's chunks into events, and builds the message that the events describe.

    A block is open until another begins or the answer ends. The tokens of one step that belong to one block are one
    event.

    message  the message so far; complete after `end()`
    """

    def __init__(self, model: str, *, shows_thoughts: bool = True) -> None:
        self._shows_thoughts = shows_thoughts
        self.message: Message = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage({"prompt_tokens": 0, "completion_tokens": 0}),
        }
        self._has_begun, self._is_open = False, False
        self._text, self._num_sent = "", 0  # of the open block; number of characters in events
        self._last: Mapping[str, Any] = {}
        self._reason, self._stop = "stop", None

    def take(self, chunks: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """The events of a step's chunks."""
        for chunk in chunks:
            if not self._has_begun:
                self._has_begun = True
                start = {**self.message, "content": [], "usage": _usage(chunk["usage"])}
                yield {"type": "message_start", "message": start}
                yield {"type": "ping"}
            if "mbd" in chunk:
                self._last = chunk
            for choice in chunk["choices"]:
                yield from self._add(choice["delta"])
                if choice["finish_reason"] is not None:
                    self._reason, self._stop = choice["finish_reason"], choice["stop_reason"]
        yield from self._send()

    def end(self) -> Iterator[dict[str, Any]]:
        """The events after the last chunk. An answer that ended with nothing to show gets an empty text."""
        shown = {block["type"] for block in self.message["content"]}
        if self._reason == "stop" and not shown & {"text", "tool_use"}:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._close()
        is_sequence = self._reason == "stop" and isinstance(self._stop, str)
        self.message["stop_reason"] = "stop_sequence" if is_sequence else REASONS[self._reason]
        self.message["stop_sequence"] = self._stop if is_sequence else None
        self.message["usage"] = _usage(self._last["usage"])
        self.message["mbd"] = self._last["mbd"]
        ends = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ends, "usage": self.message["usage"], "mbd": self.message["mbd"]}
        yield {"type": "message_stop"}

    def _add(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if delta.get("reasoning"):
            yield from self._grow(
                "thinking", delta["reasoning"], {"type": "thinking", "thinking": "", "signature": ""}
            )
        calls = delta.get("tool_calls", ())
        is_after_calls = any(block["type"] == "tool_use" for block in self.message["content"])
        if delta.get("content") and not is_after_calls:
            yield from self._grow("text", delta["content"], {"type": "text", "text": ""})
        for call in calls:
            function = call["function"]
            if "id" in call:
                use_id = f"toolu_{call['id'].removeprefix('call_')}"
                yield from self._begin({"type": "tool_use", "id": use_id, "name": function["name"], "input": {}})
            self._text += function["arguments"]
        if delta.get("content") and is_after_calls:
            yield from self._grow("text", delta["content"], {"type": "text", "text": ""})

    def _grow(self, kind: BlockKind, text: str, new: AnswerBlock) -> Iterator[dict[str, Any]]:
        """Add text to the open block; a block of another kind is closed first, and `new` begins."""
        if not self._is_open or self.message["content"][-1]["type"] != kind:
            yield from self._begin(new)
        self._text += text

    def _begin(self, block: AnswerBlock) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self.message["content"].append(block)
        self._is_open, self._text, self._num_sent = True, "", 0
        yield {"type": "content_block_start", "index": self._index, "content_block": {**block}}

    def _send(self) -> Iterator[dict[str, Any]]:
        """The delta of the open block's new text."""
        if not self._is_open or self._num_sent == len(self._text):
            return
        new, self._num_sent = self._text[self._num_sent :], len(self._text)
        kind = self.message["content"][-1]["type"]
        if kind != "thinking" or self._shows_thoughts:
            delta_type, member = DELTAS[kind]
            yield self._delta({"type": delta_type, member: new})

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        yield from self._send()
        block = self.message["content"][-1]
        if block["type"] == "text":
            block["text"] = self._text
        elif block["type"] == "thinking":
            block["thinking"] = self._text if self._shows_thoughts else ""
            block["signature"] = SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        else:
            block["input"] = call_input(self._text)
        self._is_open = False
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _usage(usage: Mapping[str, Any]) -> MessageUsage:
    """A chat's usage, in which the prompt's cached tokens count apart from the other tokens."""
    num_cached = usage.get("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"]
    counts: MessageUsage = {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
    }
    if "completion_tokens_details" in usage:
        counts["output_tokens_details"] = {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]}
    return counts
