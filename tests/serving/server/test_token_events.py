"""A stream's text goes out a token an event, whatever a step committed, and joins to the whole answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from local_server import LIMIT, MODEL, ROUTES, ask, server_of

from mbd_core.serving.api.errors import ApiError

LONG = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "decoding": {"buffer_size": 4, "tau_m2t": 0.0}}
DETAILS = {"return_token_ids": True, "return_step_map": True}


def pieces(folder: Path, route: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]], list[list[str]]]:
    """The whole answer; the same one's objects; and its events as they go out together."""
    server = server_of(folder)
    body = json.dumps({"model": MODEL} | ROUTES[route] | LONG | fields | {"stream": True}).encode()

    async def scenario() -> tuple[Any, ...]:
        [whole] = await ask(server, route, **LONG | fields)
        streamed = await ask(server, route, **LONG | fields, stream=True)
        answer = await getattr(server, route)(body)
        groups = [group async for group in answer.event_groups(lambda error: ApiError(500, str(error)))]
        await server.stop()
        return whole, streamed, groups

    return asyncio.run(asyncio.wait_for(scenario(), LIMIT))  # type: ignore[return-value]


def said(choice: dict[str, Any]) -> str:
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return text or ""


@pytest.mark.parametrize("route", ROUTES)
def test_each_token_has_an_event_of_its_own(tiny_model_dir: Path, route: str) -> None:
    whole, streamed, groups = pieces(tiny_model_dir, route, **DETAILS, logprobs=0 if route == "complete" else True)
    (expected,) = whole["choices"]
    texts = [said(c) for o in streamed for c in o["choices"]]
    assert "".join(texts) == (expected["text"] if route == "complete" else expected["message"]["content"])
    parts = [c for o in streamed for c in o["choices"] if c.get("token_ids")]
    assert {len(c["token_ids"]) for c in parts} == {1}
    assert [t for c in parts for t in c["token_ids"]] == expected["token_ids"]
    for column in ("step_map", "logprobs"):
        assert [value for c in parts for value in c["rollout"][column]] == expected["rollout"][column]
        assert {len(c["rollout"][column]) for c in parts} == {1}
    assert [c["rollout"].get("terminal") for c in parts] == [None] * (len(parts) - 1) + [
        expected["rollout"]["terminal"]
    ]
    assert len(groups) < len(parts), "what a step committed goes out in one piece"
    assert sum(map(len, groups)) == len(streamed) + 1


@pytest.mark.parametrize("route", ROUTES)
def test_text_alone_goes_out_as_its_tokens_complete_it(tiny_model_dir: Path, route: str) -> None:
    whole, streamed, _ = pieces(tiny_model_dir, route)
    texts = [text for o in streamed for c in o["choices"] if (text := said(c))]
    assert whole["usage"]["completion_tokens"] / 2 < len(texts) <= whole["usage"]["completion_tokens"]
    assert max(map(len, texts)) <= 24, "a token's text, or a character's that several tokens make"


def test_a_stop_string_across_tokens_ends_the_events_where_it_begins(tiny_model_dir: Path) -> None:
    whole, *_ = pieces(tiny_model_dir, "complete")
    text = whole["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    stopped, streamed, _ = pieces(tiny_model_dir, "complete", stop=stop, return_token_ids=True)
    joined = "".join(said(c) for o in streamed for c in o["choices"])
    assert joined == stopped["choices"][0]["text"] == text[: text.index(stop)]
    ids = [t for o in streamed for c in o["choices"] for t in c.get("token_ids", ())]
    assert ids == stopped["choices"][0]["token_ids"]


def test_arguments_of_a_call_go_out_in_parts(tiny_model_dir: Path) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 12}}, "required": ["text"]}
    tool = {"type": "function", "function": {"name": "count", "parameters": schema}}
    asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}
    whole, streamed, _ = pieces(tiny_model_dir, "chat", **asked, decoding={"buffer_size": 1})
    calls = [d for o in streamed for c in o["choices"] for d in c["delta"].get("tool_calls", ())]
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert "".join(d["function"].get("arguments", "") for d in calls) == call["function"]["arguments"]
    assert len(calls) > 3
