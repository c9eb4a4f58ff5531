"""Frames in a stream: typed events beside the committed text, which they leave as it is."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from local_server import LocalServer, run, server_of
from pydantic import TypeAdapter

from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.openapi import openapi_document
from mbd_core.serving.api.shapes import FrameEvent
from mbd_core.serving.server.text_stream import MAX_UNREAD_FRAMES

FRAME = TypeAdapter(FrameEvent)
ROUTES: dict[str, dict[str, Any]] = {
    "complete": {"prompt": "Tom has 3 apples."},
    "chat": {"messages": [{"role": "user", "content": "Tom has 3 apples."}]},
}
SLOW = {"buffer_size": 2, "tau_m2t": 0.05}


def on_server(folder: Path, scenario: Callable[[LocalServer], Awaitable[Any]]) -> Any:
    server = server_of(folder)
    return run(server, lambda: scenario(server))


async def events(server: LocalServer, route: str, **fields: Any) -> list[str]:
    body = {"model": "tiny", "max_tokens": 30, "stream": True, "decoding": SLOW} | ROUTES[route] | fields
    answer = await getattr(server, route)(json.dumps(body).encode())
    return [event async for event in answer.events(lambda error: ApiError(500, str(error)))]


def split(sent: list[str]) -> tuple[list[FrameEvent], list[dict[str, Any]]]:
    """The frames, each as its type has it, and the chunks; the last event is [DONE]."""
    assert sent[-1] == "data: [DONE]\n\n"
    frames, chunks = [], []
    for event in sent[:-1]:
        kind, _, data = event.partition("data: ")
        if kind == "event: frame\n":
            frames.append(FRAME.validate_json(data, strict=True))
        else:
            assert kind == ""
            chunks.append(json.loads(data))
    return frames, chunks


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in own)


@pytest.mark.parametrize("route", ROUTES)
def test_the_committed_stream_is_the_same_beside_frames(tiny_model_dir: Path, route: str) -> None:
    asked = {"n": 2, "temperature": 1.0, "seed": 5, "stream_options": {"include_usage": True}}

    async def scenario(server: LocalServer) -> tuple[list[str], list[str]]:
        return await events(server, route, **asked), await events(server, route, frames=True, **asked)

    plain, shown = on_server(tiny_model_dir, scenario)
    assert not any("frame" in event for event in plain), "who does not ask sees nothing of them"
    (no_frames, before), (frames, chunks) = split(plain), split(shown)
    assert not no_frames and len(frames) == chunks[-1]["mbd"]["num_forwards"]
    schema = {**openapi_document(), "$ref": "#/components/schemas/FrameEvent"}
    for index in (0, 1):
        assert text_of(chunks, index) == text_of(before, index) != ""
        own = [f["frame"] for f in frames if f["frame"]["index"] == index]
        assert [f["forward"] for f in own] == list(range(1, len(own) + 1))
        assert own[0]["position"] <= 0 and {f["num_slots"] for f in own} == {2}
        for event in frames:
            jsonschema.validate(event, schema, jsonschema.Draft202012Validator)
            for slot in event["frame"]["slots"]:
                assert [t is None for t in slot["tokens"]] == [t is None for t in slot["texts"]]
                assert len(slot["tokens"]) <= 4, "a slot is a block at most"


def test_openai_s_client_takes_a_frame_for_a_chunk_without_choices(tiny_model_dir: Path) -> None:
    async def scenario(server: LocalServer) -> list[str]:
        return await events(server, "chat", frames=True)

    sent = on_server(tiny_model_dir, scenario)

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text="".join(sent))

    client = openai.OpenAI(
        base_url="http://tiny/v1", api_key="none", http_client=httpx.Client(transport=httpx.MockTransport(answer))
    )
    stream = client.chat.completions.create(model="tiny", messages=[], stream=True, extra_body={"frames": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    frames, own = split(sent)
    assert text == text_of(own) != ""
    assert [c.model_extra["frame"] for c in chunks if c.model_extra and "frame" in c.model_extra] == [
        f["frame"] for f in frames
    ]


def test_frames_without_a_stream_are_a_400(tiny_model_dir: Path) -> None:
    async def scenario(server: LocalServer) -> None:
        for route in ROUTES:
            with pytest.raises(ApiError, match="stream") as caught:
                await events(server, route, frames=True, stream=False)
            assert (caught.value.status, caught.value.param) == (400, "frames")

    on_server(tiny_model_dir, scenario)


def test_frames_that_nobody_reads_are_dropped_and_no_text_is(tiny_model_dir: Path) -> None:
    slow = {"max_tokens": 2 * MAX_UNREAD_FRAMES, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}, "prompt": [5] * 8}

    async def scenario(server: LocalServer) -> tuple[list[str], list[str]]:
        body = {"model": "tiny", "stream": True, "frames": True} | slow
        answer = await server.complete(json.dumps(body).encode())
        while server.service.engine.load.running or server.service.engine.load.waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        late = [event async for event in answer.events(lambda error: ApiError(500, str(error)))]
        return late, await events(server, "complete", **slow)

    late, plain = on_server(tiny_model_dir, scenario)
    frames, chunks = split(late)
    assert chunks[-1]["mbd"]["num_forwards"] > MAX_UNREAD_FRAMES == len(frames)
    assert text_of(chunks) == text_of(split(plain)[1])
