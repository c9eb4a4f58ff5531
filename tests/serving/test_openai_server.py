"""The API over one engine, without HTTP and without Ray."""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import REFUSAL, with_strict_template

from mbd_core.engine.engine_config import EngineConfig
from mbd_core.serving.endpoint_args import EndpointArgs
from mbd_core.serving.openai_errors import ApiError
from mbd_core.serving.openai_server import OpenAIServer
from mbd_core.serving.text_stream import EngineFailed

LIMIT = 300  # seconds for what ends by itself, however busy the machine is


def server_of(folder: Path, **settings: Any) -> OpenAIServer:
    engine = EngineConfig(max_rows=2, num_pages=64)
    return OpenAIServer(EndpointArgs(folder=str(folder), name="tiny", engine=engine, **settings))


def run(server: OpenAIServer, scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        try:
            async with asyncio.timeout(LIMIT):
                return await scenario()
        finally:
            await server.stop()

    return asyncio.run(limited())


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "max_tokens": 8} | fields).encode()


def turns(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": "Tom has 3 apples."} for role in roles]


async def refusal(answer: Coroutine[Any, Any, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await answer
    return caught.value


def test_a_chat_template_s_refusal_is_a_400_with_the_template_s_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    server = server_of(with_strict_template(tiny_model_dir, tmp_path / "strict"))

    async def scenario() -> None:
        for wrong in (turns("assistant"), turns("user", "user"), turns("system", "assistant")):
            error = await refusal(server.chat(body(messages=wrong)))
            assert (error.status, error.param, error.code) == (400, "messages", "invalid_value")
            assert error.message == f"messages: the model's chat template refuses these messages: {REFUSAL}"
        for right in (turns("user"), turns("developer", "user", "assistant", "user")):
            answer = await server.chat(body(messages=right))
            assert (await answer.whole())["object"] == "chat.completion"

    run(server, scenario)


def test_a_model_without_a_chat_template_refuses_chats(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)
    server.loaded.tokenizer.chat_template = None

    async def scenario() -> None:
        error = await refusal(server.chat(body(messages=turns("user"))))
        assert (error.status, error.param) == (400, "messages")
        assert "no chat template" in error.message

    run(server, scenario)


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_the_loop_goes_on_while_a_prompt_becomes_tokens(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """The tokenizer waits for what only the event loop can do: were it on the loop, nothing would move."""
    server = server_of(tiny_model_dir)
    loop_moved, threads = threading.Event(), set()
    kind = type(server.loaded.tokenizer)
    original = kind._encode_plus

    def slow(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.get_ident())
        assert loop_moved.wait(60), "the event loop stood still while the tokenizer worked"
        return original(*args, **kwargs)

    monkeypatch.setattr(kind, "_encode_plus", slow)
    fields = {"messages": turns("user")} if route == "chat" else {"prompt": "Tom has"}

    async def scenario() -> None:
        answers = [asyncio.create_task(getattr(server, route)(body(**fields))) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        loop_moved.set()
        for answer in answers:
            assert (await (await answer).whole())["usage"]["completion_tokens"] <= 8
        assert threads and len(threads) == 1, "one thread tokenises: a tokenizer's settings are not thread-safe"
        assert threading.get_ident() not in threads

    run(server, scenario)


def test_health_tells_the_kv_memory_and_the_graphs(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)

    async def scenario() -> None:
        state = server.health()
        assert state["kv_cache"] == {"num_pages": 64, "page_size": 16, "tokens": 63 * 16}
        assert state["graphs"] == server.loaded.engine.graph_report()
        assert state["ready"]
        assert "KV memory: 1,008 tokens in 64 pages" in server.describe()
        await server.engine.stop()
        with pytest.raises(EngineFailed):
            await server.complete(body(prompt="x"))
        assert not server.health()["ready"]

    run(server, scenario)


def test_editing_a_model_not_trained_for_it_is_noted_once(tiny_model_dir: Path) -> None:
    server, notes = server_of(tiny_model_dir), list[str]()

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    server._log = logging.Logger("notes")
    server._log.addHandler(Notes())
    untrained, trained = server.loaded, {**server.loaded.defaults, "t2t": {"tau": 0.5}}

    async def scenario() -> None:
        for loaded, expected in ((untrained, 1), (replace(untrained, defaults=trained), 0)):
            notes.clear()
            server.loaded, server._edit_noted = loaded, False
            for decoding in ({}, {"t2t": {}}, {"t2t": {"tau": 0.9}}):
                await (await server.complete(body(prompt="x", decoding=decoding))).whole()
            assert len(notes) == expected, "once, and only where generation_config.json names no t2t"

    run(server, scenario)
