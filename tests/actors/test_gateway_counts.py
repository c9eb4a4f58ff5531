"""What each API key may have under way, over HTTP to a gateway in this process."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from gateway_in_process import running_gateway, undecorated

from actors.serving import gateway
from actors.serving.args import ServingArgs
from mbd_core.serving.server.open_requests import OpenRequests

LIMIT = 300
MODEL, ANN, BEN = "tiny", "ann-0123456789abcdef", "ben-0123456789abcdef"


@pytest.fixture(scope="module")
def url(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("secrets") / "keys"
    keys.write_text(f"ann {ANN}\nben {BEN}\n")
    model = {"model": str(tiny_model_dir), "name": MODEL, "engine": {"max_rows": 2, "num_pages": 200}}
    fields = {"device": "cpu", "models": [model], "api_keys": str(keys), "client_requests": 4, "body_prompts": 3}
    with running_gateway(ServingArgs.read(fields)) as (url, _):
        yield url


@pytest.fixture
def failures() -> Iterator[list[str]]:
    """What the server logs as its own failures."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ray.serve")
    log.addHandler(handler)
    yield found
    log.removeHandler(handler)


def ask(url: str, key: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "Tom has 3 pens.", "max_tokens": 4} | fields
    return httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=LIMIT)


def half_a_body(url: str, key: str) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=LIMIT)
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Content-Length: 1000"]
    connection.sendall("\r\n".join([*lines, "", '{"model": ']).encode())
    return connection


def wait_until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.02)


def check_refusal(answer: httpx.Response, status: int, code: str, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


def test_a_body_that_alone_is_too_much_is_a_400_that_names_its_field(url: str) -> None:
    for fields, param in (({"prompt": ["a"] * 4}, "prompt"), ({"n": 5}, "n"), ({"prompt": ["a"] * 3, "n": 2}, "n")):
        check_refusal(ask(url, ANN, **fields), 400, "invalid_value", param)
    served = ask(url, ANN, prompt=["a", "b"], n=2)
    assert served.status_code == 200 and len(served.json()["choices"]) == 4
    schemas = httpx.get(f"{url}/openapi.json", timeout=LIMIT).json()["components"]["schemas"]
    assert schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"][1]["maxItems"] == 3


def test_rows_of_ray_data_are_no_key_that_has_too_many_choices() -> None:
    """All rows wait as one client, however many choices they ask for."""
    open_requests, num_asked = OpenRequests(most_each=4), 0

    async def asked(body: bytes, *, key: str, limited: bool) -> SimpleNamespace:
        nonlocal num_asked
        request = open_requests.begin(key, limited=limited)
        request.take_choices(1, 8, prompt_field="messages")
        num_asked += bool(key)
        return SimpleNamespace(whole=partial(asyncio.sleep, 0, {"id": "x"}), close=lambda: None)

    servable = object.__new__(undecorated(gateway.Gateway))
    servable.server = SimpleNamespace(chat=asked, complete=asked)

    async def answers() -> list[dict[str, Any]]:
        both = (servable.answer_chat, servable.answer_completion)
        return [answer for ask_row in both async for answer in ask_row({"model": MODEL, "n": 8})]

    assert asyncio.run(answers()) == [{"id": "x"}] * 2 and num_asked == 2


def test_bodies_that_do_not_come_keep_their_key_from_more_and_nobody_else(url: str, failures: list[str]) -> None:
    slow = [half_a_body(url, ANN) for _ in range(4)]
    try:
        wait_until(lambda: ask(url, ANN).status_code == 429)
        refused = ask(url, ANN)
        check_refusal(refused, 429, "too_many_requests", None)
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(url, BEN, prompt=["a", "b"], n=2).status_code == 200
    finally:
        for connection in slow:
            connection.close()
    wait_until(lambda: ask(url, ANN, n=4).status_code == 200)
    assert not failures, "a client that leaves is no failure of the server"
