"""A chat's answer in the form of OpenAI's Responses: one object, or events in the order of OpenAI's API."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.response_items import (
    call_item,
    entries,
    finished,
    message_item,
    output_text,
    reasoning_item,
    whole_response,
)
from mbd_core.serving.api.response_shapes import Response
from mbd_core.serving.api.responses import ResponsesRequest
from mbd_core.serving.server.answer import ServedAnswer


class ResponseAnswer:
    """The answer to a `ResponsesRequest`, made from the chat's `answer`; the caller must `close()` it."""

    def __init__(self, request: ResponsesRequest, answer: ServedAnswer) -> None:
        self._answer, self.streamed = answer, answer.streamed
        self._response = request.response(id=f"resp_{uuid.uuid4().hex}", created=int(time.time()))

    def close(self) -> None:
        """Aborts the unfinished request."""
        self._answer.close()

    async def whole(self) -> Response:
        """The whole answer in one object."""
        return whole_response(self._response, await self._answer.whole())

    async def event_groups(self, on_failure: Callable[[Exception], ApiError]) -> AsyncIterator[list[str]]:
        """The answer as server-sent events, grouped by step; a failure becomes the last event."""
        events = _Events(self._response)
        yield list(events.begin())
        try:
            async for chunks in self._answer.chunks():
                yield [text for chunk in chunks for text in events.take(chunk)]
            yield list(events.end())
        except Exception as error:
            yield [events.failure(on_failure(error))]


class _Events:
    """Turns a chat's chunks into events; an item is open until another begins or the answer ends."""

    def __init__(self, response: Response) -> None:
        self._response, self._suffix = response, response["id"].removeprefix("resp_")
        self._number = 0
        self._output: list[Any] = []  # finished items
        self._item: dict[str, Any] | None = None
        self._text = ""  # of the open item
        self._logprobs, self._num_sent = list[Any](), 0  # of the message's tokens; number sent
        self._reason, self._last = "stop", dict[str, Any]()

    def begin(self) -> Iterator[str]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def take(self, chunk: Any) -> Iterator[str]:
        """The events of a chunk."""
        if "mbd" in chunk:
            self._last = chunk
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("reasoning"):
                yield from self._add_reasoning(delta["reasoning"])
            self._logprobs += entries(choice)
            if delta.get("content"):
                yield from self._add_text(delta["content"])
            for call in delta.get("tool_calls", ()):
                yield from self._add_call(call)
            self._reason = choice["finish_reason"] or self._reason

    def end(self) -> Iterator[str]:
        """The events after the last chunk. An answer without text and calls gets one empty message."""
        if self._item is None and not self._output:
            yield from self._open_message()
        elif self._item is not None and self._item["type"] == "reasoning" and self._reason in ("stop", "tool_calls"):
            yield from self._close_item()
            yield from self._open_message()
        is_whole = self._reason in ("stop", "tool_calls")
        yield from self._close_item("completed" if is_whole else "incomplete")
        response = finished(self._response, self._last, self._output, self._reason)
        yield self._event("response.completed" if is_whole else "response.incomplete", response=response)

    def failure(self, error: ApiError) -> str:
        fields = error.body["error"]
        return self._event("error", code=fields["code"], message=fields["message"], param=fields["param"])

    def _add_text(self, text: str) -> Iterator[str]:
        if self._item is None or self._item["type"] != "message":
            yield from self._close_item()
            yield from self._open_message()
        self._text += text
        new = self._logprobs[self._num_sent :]
        self._num_sent = len(self._logprobs)
        yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=new)

    def _add_reasoning(self, text: str) -> Iterator[str]:
        if self._item is None or self._item["type"] != "reasoning":
            yield from self._close_item()
            self._item, self._text = dict(reasoning_item(f"rs_{self._suffix}", None, status="in_progress")), ""
            yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
            part = {"type": "reasoning_text", "text": ""}
            yield self._of_item("response.content_part.added", content_index=0, part=part)
        self._text += text
        yield self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _open_message(self) -> Iterator[str]:
        item_id = f"msg_{self._suffix}" + (f"_{len(self._output)}" if self._output else "")
        self._item, self._text = dict(message_item(item_id, None, status="in_progress")), ""
        yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        yield self._of_item("response.content_part.added", content_index=0, part=output_text(""))

    def _add_call(self, call: dict[str, Any]) -> Iterator[str]:
        function = call["function"]
        if "id" in call:
            yield from self._close_item()
            item_id = f"fc_{self._suffix}_{call['index']}"
            self._item = dict(call_item(item_id, call["id"], function["name"], "", status="in_progress"))
            self._text = ""
            yield self._event("response.output_item.added", output_index=len(self._output), item=self._item)
        if function["arguments"]:
            self._text += function["arguments"]
            yield self._of_item("response.function_call_arguments.delta", delta=function["arguments"])

    def _close_item(self, status: Any = "completed") -> Iterator[str]:
        if self._item is None:
            return
        item = self._item
        if item["type"] == "message":
            part = output_text(self._text, self._logprobs)
            yield self._of_item("response.output_text.done", content_index=0, text=self._text, logprobs=self._logprobs)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
            whole: Any = message_item(item["id"], self._text, self._logprobs, status=status)
        elif item["type"] == "reasoning":
            shown = {"type": "reasoning_text", "text": self._text}
            yield self._of_item("response.reasoning_text.done", content_index=0, text=self._text)
            yield self._of_item("response.content_part.done", content_index=0, part=shown)
            whole = reasoning_item(item["id"], self._text, status=status)
        else:
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=self._text)
            whole = call_item(item["id"], item["call_id"], item["name"], self._text, status=status)
        yield self._event("response.output_item.done", output_index=len(self._output), item=whole)
        self._output, self._item = [*self._output, whole], None

    def _of_item(self, kind: str, **fields: Any) -> str:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
