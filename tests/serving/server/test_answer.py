"""An answer from the engine's steps; the shapes themselves are tested over HTTP (tests/ray/test_endpoint.py)."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from mbd_core.serving.api.errors import ApiError, api_error
from mbd_core.serving.api.replies import Reply
from mbd_core.serving.server.answer import DONE, AnswerParts, ServedAnswer
from mbd_core.serving.tokens.stream import EngineFailed


class BrokenStream:
    requests = ()

    async def __aiter__(self) -> AsyncIterator[Any]:
        raise EngineFailed("secret")
        yield


def test_a_failure_inside_a_stream_is_an_event_and_no_done() -> None:
    failures: list[Exception] = []

    def on_failure(error: Exception) -> ApiError:
        failures.append(error)
        return api_error(error)

    async def sent() -> list[str]:
        reply = Reply(id="x", created=0, model="m", chat=True)
        answer = ServedAnswer(reply, BrokenStream(), AnswerParts(streamed=True))  # type: ignore[arg-type]
        return [e async for e in answer.events(on_failure)]

    (only,) = asyncio.run(sent())
    assert only != DONE
    assert json.loads(only.removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert "secret" not in only
    assert [type(f) for f in failures] == [EngineFailed]
