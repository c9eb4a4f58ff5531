"""actors/serving/proxy/answers.py: what clients get where Serve's proxy answers by itself, or its gateway dies."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actors.serving.proxy import answers as proxy_answers
from actors.serving.proxy import middlewares
from mbd_core.serving.api.errors import ApiError

App = Callable[[Any, Any, Any], Awaitable[None]]
CHAT = "/v1/chat/completions"


def start(status: int, kind: bytes | None, *more: tuple[bytes, bytes]) -> dict[str, Any]:
    headers = [*([] if kind is None else [(b"content-type", kind)]), *more]
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Proxy:
    """Serve's proxy: at the n-th call it sends what is scripted for it, after it has read the body."""

    proxy_router = SimpleNamespace(route_info={"/": "another application's"}, match_route=lambda path: None)

    def __init__(self, *scripts: list[dict[str, Any]]) -> None:
        self.scripts, self.bodies = list(scripts), list[bytes]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        for message in self.scripts.pop(0) if self.scripts else []:
            await send(message)


def answered(
    proxy: Proxy, *, method: str = "POST", path: str = CHAT, body: list[bytes] | None = None, leaves: bool = False
) -> list[dict[str, Any]]:
    """What a client is sent by the proxy with all that Serve puts around it."""
    pieces = [b'{"model":', b' "m"}'] if body is None else body
    incoming = [
        {"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces)} for i, piece in enumerate(pieces)
    ]
    if leaves:
        incoming.insert(1, {"type": "http.disconnect"})
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app: App = proxy
    for middleware in middlewares():
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    asyncio.run(app({"type": "http", "method": method, "path": path, "headers": []}, receive, send))
    return sent


def error_of(sent: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    head, body = sent
    assert dict(head["headers"])[b"content-type"] == b"application/json"
    assert dict(head["headers"])[b"content-length"] == str(len(body["body"])).encode()
    error = json.loads(body["body"])["error"]
    as_gateways = ApiError(head["status"], error["message"], code=error["code"]).body
    assert json.loads(body["body"]) == as_gateways, "the shape of a gateway's errors"
    return head["status"], error


OK = [start(200, b"application/json"), part(b"{}")]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_answers, "PAUSE", 0.0)


@pytest.mark.parametrize("path", [CHAT, "/prefix/v1/completions", "/tokenize", "/v1/messages", "/v1/responses"])
def test_a_request_whose_gateway_dies_unanswered_goes_to_another_one(path: str) -> None:
    proxy = Proxy([], OK)
    assert answered(proxy, path=path) == OK
    assert proxy.bodies == [b'{"model": "m"}'] * 2


def test_without_a_gateway_it_is_a_503_that_says_when_to_ask_again() -> None:
    proxy = Proxy()
    sent = answered(proxy)
    status, error = error_of(sent)
    assert (status, error["code"], error["type"]) == (503, "no_gateway", "server_error")
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert len(proxy.bodies) == 1 + proxy_answers.REPEATS


@pytest.mark.parametrize("path", ["/update_weights", "/sleep", "/wakeup", "/abort_requests"])
def test_an_order_is_not_given_twice(path: str) -> None:
    """Neither by the proxy nor by a client that does what the answer says."""
    proxy = Proxy([], OK)
    sent = answered(proxy, path=path)
    status, error = error_of(sent)
    assert status == 503 and "look before you repeat it" in error["message"]
    assert not any(name == b"retry-after" for name, _ in sent[0]["headers"])
    assert len(proxy.bodies) == 1


def test_a_large_body_is_not_kept_to_be_repeated() -> None:
    proxy = Proxy([], OK)
    half = b"x" * (proxy_answers.KEPT_BYTES // 2 + 1)
    assert error_of(answered(proxy, body=[half, half]))[1]["code"] == "no_gateway"
    assert len(proxy.bodies) == 1


def test_nothing_is_repeated_for_a_client_that_left() -> None:
    proxy = Proxy(OK, OK)
    assert answered(proxy, leaves=True) == []
    assert proxy.bodies == []


def test_errors_on_anthropic_s_routes_have_anthropic_s_shape() -> None:
    for path in ("/v1/messages", "/prefix/v1/messages/count_tokens", "/v1/messages/", "/v1/messages/batches"):
        _, body = answered(Proxy(), path=path)
        error = json.loads(body["body"])
        assert error["type"] == "error" and error["error"]["type"] == "overloaded_error"
        assert error["error"]["details"]["error_code"] == "no_gateway"
    refused = start(503, b"text/plain")
    refused["headers"].append((b"x-request-id", b"req-1"))
    head, body = answered(Proxy([refused, part(b"none")]), path="/v1/messages")
    assert (b"request-id", b"req-1") in head["headers"] and json.loads(body["body"])["request_id"] == "req-1"
    begun = [start(200, b"text/event-stream"), part(b"event: ping\n\n", more=True)]
    *_, last = answered(Proxy(begun, OK), path="/v1/messages")
    event, _, data = last["body"].decode().partition("\ndata: ")
    assert event == "event: error" and json.loads(data)["error"]["type"] == "api_error"


def test_a_stream_that_is_cut_ends_with_an_error_event() -> None:
    begun = [start(200, b"text/event-stream; charset=utf-8"), part(b"data: {}\n\n", more=True)]
    *before, last = answered(Proxy(begun, OK))
    assert before == begun
    assert not last.get("more_body", False)
    text = last["body"].decode()
    assert text.startswith("data: ") and text.endswith("\n\n")
    error = json.loads(text.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("stream_cut", "server_error")


@pytest.mark.parametrize(
    ("status", "text", "code"),
    [
        (404, b"Path '/x' not found. Ping http://.../-/routes for available routes.", None),
        (408, b"Request 1 timed out after 660s.", "timeout"),
        (429, b"Request dropped due to backpressure", "too_many_requests"),
        (500, b"Internal Server Error", None),
        (503, b"no replica", "no_gateway"),
        (404, b"x" * 100_000, None),
    ],
)
def test_a_refusal_of_serve_s_own_is_an_error_with_its_status_and_headers(
    status: int, text: bytes, code: str | None
) -> None:
    script = [
        start(status, b"text/plain; charset=utf-8", (b"x-request-id", b"1"), (b"content-length", b"9999")),
        part(text[:20], more=True),
        part(text[20:]),
    ]
    sent = answered(Proxy(script))
    assert (b"x-request-id", b"1") in sent[0]["headers"]
    seen, error = error_of(sent)
    assert (seen, error["code"]) == (status, code)
    assert error["message"] == text.decode()[: proxy_answers.MESSAGE_LENGTH]


@pytest.mark.parametrize(
    ("path", "script"),
    [
        ("/metrics", [start(200, b"text/plain"), part(b"ray_mbd 1")]),
        (CHAT, [start(400, b"application/json"), part(b'{"error": {}}')]),
        ("/-/healthz", [start(503, b"text/plain"), part(b"draining")]),
        (CHAT, [start(200, b"text/event-stream"), part(b"data: [DONE]\n\n", more=True), part(b"")]),
    ],
)
def test_every_other_answer_passes_as_it_is(path: str, script: list[dict[str, Any]]) -> None:
    assert answered(Proxy(list(script)), path=path, method="GET") == script


def test_the_proxy_s_process_loads_no_pytorch() -> None:
    code = "import sys, actors.serving.proxy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
