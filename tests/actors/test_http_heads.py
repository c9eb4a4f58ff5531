"""actors/serving/proxy/heads.py: what a client sends before its key is looked at stays within bounds."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import uvicorn
from raw_http import RawHttp, post, read_all, statuses

from actors.serving.proxy import heads as http_heads
from actors.serving.proxy import middlewares
from actors.serving.proxy.heads import HEAD_BYTES, NUM_HEADERS, NUM_PIPELINED
from benchmarks.load.crowd import _send_headers

LIMIT = 60.0  # seconds that the server may leave a client without a byte
MIB = 2**20
END = b"\r\n\r\n"
START = b"GET /seen HTTP/1.1\r\nHost: test\r\n"


class App:
    """Says how many headers and bytes of a body came; `slow` holds an answer back until it is set."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.slow = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(dict(scope))
        assert scope["type"] == "http", "no WebSocket gets here"
        number, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            number, more = number + len(message.get("body", b"")), message.get("more_body", False)
        if scope["path"] == "/slow":
            await asyncio.to_thread(self.slow.wait, LIMIT)
        said = json.dumps({"headers": len(scope["headers"]), "body": number}).encode()
        fields = [(b"content-length", str(len(said)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": said})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def raw(app: App) -> Iterator[RawHttp]:
    """A server as Serve starts its proxy's: uvicorn's default protocol, after the callback."""
    from uvicorn.protocols.http import auto

    before = auto.AutoHTTPProtocol
    middlewares()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = uvicorn.Config(app, port=port, log_config=None, log_level="critical", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + LIMIT
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        yield RawHttp("127.0.0.1", port, LIMIT)
    finally:
        app.slow.set()
        server.should_exit = True
        thread.join()
        auto.AutoHTTPProtocol = before


def check_refused(answer: bytes, status: int, code: str) -> None:
    assert statuses(answer) == [status], answer[:200]
    head, _, body = answer.partition(END)
    assert b"content-type: application/json" in head and b"connection: close" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code


def said(answer: bytes) -> dict[str, int]:
    assert statuses(answer) == [200], answer[:200]
    return dict(json.loads(answer.partition(END)[2]))


def headers(number: int, size: int = 10) -> bytes:
    return b"".join(b"x-%d: %s\r\n" % (i, b"a" * size) for i in range(number))


def test_heads_within_the_bounds_are_read(raw: RawHttp, app: App) -> None:
    close = b"Connection: close\r\n"
    assert said(raw.exchange(START + close + headers(NUM_HEADERS - 2) + b"\r\n"))["headers"] == NUM_HEADERS
    assert said(raw.exchange(START + close + headers(1, HEAD_BYTES - 5000) + b"\r\n"))["headers"] == 3
    assert said(raw.exchange(b"GET /?" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: test\r\n" + close + b"\r\n"))
    pieces = [START + close, *(headers(1, 1)[i : i + 1] for i in range(len(headers(1, 1)))), b"\r\n"]
    assert said(raw.exchange(*pieces))["headers"] == 3


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (START + headers(NUM_HEADERS) + b"\r\n", 431, "headers_too_large"),
        (START + headers(1, HEAD_BYTES + 1) + b"\r\n", 431, "headers_too_large"),
        (START + headers(90, 1000) + b"\r\n", 431, "headers_too_large"),
        (START + headers(100, MIB), 431, "headers_too_large"),
        (START + b"a" * MIB, 431, "headers_too_large"),
        (b"GET /" + b"a" * MIB, 414, "url_too_long"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "invalid_http"),
        (START + b"no header" + END, 400, "invalid_http"),
    ],
)
def test_a_head_beyond_them_is_refused_in_openai_s_form(raw: RawHttp, sent: bytes, status: int, code: str) -> None:
    check_refused(raw.exchange(sent), status, code)


def test_bodies_of_any_size_pass_and_trailers_do_not(raw: RawHttp) -> None:
    assert said(raw.exchange(post("/seen", b"a" * MIB)))["body"] == MIB
    chunked = post("/seen", b"", "Transfer-Encoding: chunked")
    assert said(raw.exchange(chunked + b"1\r\na\r\n" * 50_000 + b"0\r\n" + headers(5) + b"\r\n"))["body"] == 50_000
    for tail in (b"0\r\n" + headers(1, MIB), b"0\r\n" + headers(NUM_HEADERS), b"1;" + b"e" * MIB):
        check_refused(raw.exchange(chunked + b"1\r\na\r\n" + tail), 431, "headers_too_large")


def test_a_slow_head_has_its_time_and_a_slow_answer_any(
    raw: RawHttp, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_heads, "HEAD_SECONDS", 0.5)
    check_refused(raw.exchange(START), 408, "timeout")
    assert raw.exchange() == b"", "a connection without a request is closed"
    with raw.connect() as peer:
        peer.sendall(b"GET /slow HTTP/1.1\r\nHost: test\r\n\r\n\r\n")
        time.sleep(1.5)
        app.slow.set()
        assert statuses(peer.recv(65536)) == [200]
        peer.sendall(START)  # the next one on this connection
        check_refused(read_all(peer), 408, "timeout")


def test_a_connection_takes_few_requests_ahead(raw: RawHttp, app: App) -> None:
    one = b"GET /slow HTTP/1.1\r\nHost: test\r\n\r\n"
    with raw.connect() as peer:
        with suppress(ConnectionError):
            peer.sendall(one * 5_000)
        read_all(peer)
    assert len(app.scopes) == 1
    app.slow.set()
    last = one.replace(b"Host", b"Connection: close\r\nHost")
    assert statuses(raw.exchange(one * NUM_PIPELINED + last)) == [200] * (NUM_PIPELINED + 1)


def test_nobody_gets_a_websocket(raw: RawHttp) -> None:
    asked = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAA="
    sent = f"GET /seen HTTP/1.1\r\nHost: test\r\n{asked}\r\n\r\n".encode()
    with raw.connect() as peer:
        peer.sendall(sent)
        assert statuses(peer.recv(65536)) == [200]
        with suppress(ConnectionError):
            peer.sendall(b"\x82" * MIB)
        check_refused(read_all(peer), 400, "invalid_http")


def test_the_benchmark_s_headers_are_refused_for_their_length(raw: RawHttp) -> None:
    async def send() -> list[str | None]:
        ended: list[str | None] = []
        sender = asyncio.create_task(_send_headers(f"http://{raw.host}:{raw.port}", ended))
        while len(ended) < 3:
            await asyncio.sleep(0.01)
        sender.cancel()
        return ended

    assert set(asyncio.run(asyncio.wait_for(send(), LIMIT))) == {"HTTP 431"}


def test_fifty_senders_of_endless_headers_cost_little_memory(raw: RawHttp) -> None:
    value, own = headers(1, MIB), psutil.Process()

    def send() -> None:
        with suppress(ConnectionError):
            raw.exchange(START, *[value] * 20)

    raw.exchange(START + headers(NUM_HEADERS) + b"\r\n")
    before = most = own.memory_info().rss
    senders = [threading.Thread(target=send) for _ in range(50)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        most = max(most, own.memory_info().rss)
        time.sleep(0.01)
    grown = (most - before) / MIB
    assert grown < 200, f"{grown:.0f} MiB of the 1000 that were sent"
