"""Serve's HTTP proxy: heads within bounds, its own answers as OpenAI's errors, short ids. Nothing heavy is imported.

uvicorn keeps request lines, headers and trailers of any length, and waits for them for ever: Serve gives it no
setting, and its parser, httptools, has none. `BoundedHttp` counts the bytes as they arrive. This file imports nothing
that is heavy, because the proxy imports it.
"""

import asyncio
import json
import re
from typing import Any, NamedTuple

import uvicorn.protocols.http.auto
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

# What Serve's HTTP proxy reads of a request before anybody is asked for a key: a head within bounds and in time.

HEAD_BYTES = 32 * 2**10  # of a request line and its headers, and of trailers
NUM_HEADERS = 100  # trailers counted
HEAD_SECONDS = 30.0  # from a request's first byte, or from the connection, to the end of its headers
NUM_PIPELINED = 16  # requests that may follow one that is not answered yet
PIECE = 4096  # bytes that are parsed before they are counted
LEAVE_SECONDS = 1.0  # in which a client that is still sending may read why it was refused


class Refusal(NamedTuple):
    """Why a head is not read, as OpenAI's error."""

    status: int
    code: str
    message: str

    @property
    def body(self) -> bytes:
        fields = {"message": self.message, "type": "invalid_request_error", "param": None, "code": self.code}
        return json.dumps({"error": fields}, separators=(",", ":")).encode()


TOO_LONG = Refusal(
    431, code="headers_too_large", message=f"the request line and headers have more than {HEAD_BYTES} bytes; send less"
)
TOO_MANY = Refusal(
    431, code="headers_too_large", message=f"the request has more than {NUM_HEADERS} headers; send fewer"
)
LONG_URL = Refusal(414, code="url_too_long", message=f"the URL has more than {HEAD_BYTES} bytes; send a shorter one")
TOO_SLOW = Refusal(408, code="timeout", message=f"the headers did not arrive within {HEAD_SECONDS:g} s")
NO_HTTP = Refusal(400, code="invalid_http", message="this is not a request in HTTP/1.1; look at its line and headers")


class HeadRefused(Exception):
    """Raised in a callback of the parser, which ends its work on the connection."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with bounds on heads and refusals in OpenAI's form; nothing here takes WebSockets."""

    url = b""  # uvicorn's, which it sets when a request begins

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ws_protocol_class = None
        self._unparsed = 0  # bytes since the last ones of a body, or of another request
        self._in_head, self._refused = True, False
        self._refusal = NO_HTTP
        self._head_limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            if self._refused or self.transport.is_closing():
                return
            piece = data[start : start + PIECE]
            self._unparsed += len(piece)
            super().data_received(piece)
            if self._unparsed > HEAD_BYTES:
                self._refuse(LONG_URL if self._in_head and len(self.url) > HEAD_BYTES - PIECE else TOO_LONG)

    # -- what the parser has found ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_limit is None:
            self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > NUM_HEADERS:
            self._refusal = TOO_MANY
            raise HeadRefused

    def on_headers_complete(self) -> None:
        self._end_head()
        size = len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if size > HEAD_BYTES:  # and ended in the piece in which it was found too long
            self._refusal = TOO_LONG
            raise HeadRefused
        if len(self.pipeline) >= NUM_PIPELINED:
            raise HeadRefused
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._unparsed = True, 0
        super().on_message_complete()

    # -- refusals -----------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn where the parser has failed."""
        self._refuse(self._refusal)

    def _begin_head(self) -> None:
        self._head_limit = self.loop.call_later(HEAD_SECONDS, self._on_late_head)

    def _end_head(self) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None

    def _on_late_head(self) -> None:
        self._head_limit = None
        if self._unparsed:
            self._refuse(TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer and read no more. A connection on which another answer is due is closed without this one."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._end_head()
        answered = self.cycle is None or self.cycle.response_complete
        if not answered:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            answered = not (self._in_head or self.cycle.response_started)
        if not answered:
            self.transport.close()
            return
        headers = {"content-type": "application/json", "content-length": len(refusal.body), "connection": "close"}
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        lines += [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
        self.transport.write(b"".join([STATUS_LINE[refusal.status], *lines, b"\r\n", refusal.body]))
        # Bytes that are not read when a connection closes reset it, and some clients then drop the answer.
        self.flow.pause_reading()
        self.loop.call_later(LEAVE_SECONDS, self.transport.close)


def bound_heads() -> None:
    """Let every uvicorn that this process starts with its default protocol, as Serve does, be a `BoundedHttp`."""
    uvicorn.protocols.http.auto.AutoHTTPProtocol = BoundedHttp


# What clients get where Serve's HTTP proxy answers by itself, or where the gateway behind it dies: OpenAI's errors.
#
#     nothing was answered yet     the request goes to another gateway, `REPEATS` times at most, then 503 `no_gateway`
#     a stream is cut              its last event is an error, as where it fails otherwise; no `[DONE]` follows
#     a refusal in plain text      an `Error` with the same status
#
# Serve's proxy leaves the first two to uvicorn, which answers "Internal Server Error", and closes the connection.
# Other answers pass through as they are, and so do Serve's own routes (`/-/healthz`). The proxy's process has no
# PyTorch: what is imported here must not need it.

REPEATS, PAUSE = 1, 0.2  # few: a request that itself ends gateways must not end all; seconds before each
KEPT_BYTES = 2**20  # of a body, to be sent again
MESSAGE_LENGTH = 400
OWN_ROUTES = "/-/"
REPEATABLE = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")  # of POST; orders are not
CODES = {408: "timeout", 429: "too_many_requests", 503: "no_gateway"}
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
LOST = "the gateway of this request died, and no other one has answered; ask again"
CUT = "the stream was cut: its gateway is gone; one that was asked for as resumable can be taken up with resume"


class ProxyAnswers:
    """The middleware, around Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        request, answer = _KeptRequest(scope, receive), _Answer(send)
        while True:
            tried = {**scope, "headers": list(scope["headers"])}
            await self._app(tried, request.receive, answer.send)
            if answer.started or request.client_left or not request.rewind():
                break
            await asyncio.sleep(PAUSE)
        if not request.client_left:
            await answer.end(headers=[pair for pair in tried["headers"] if pair[0].lower() == b"x-request-id"])


class _KeptRequest:
    """A request whose body can be received again, where that does no harm and it is not large."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive, self._kept, self._next = receive, list[Message](), 0
        self._repeats = REPEATS if scope["method"] != "POST" or scope["path"].endswith(REPEATABLE) else 0
        self._bytes = 0
        self.client_left = False

    async def receive(self) -> Message:
        if self._next < len(self._kept):
            self._next += 1
            return self._kept[self._next - 1]
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
            return message
        self._bytes += len(message.get("body", b""))
        if self._bytes > KEPT_BYTES:
            self._repeats = 0
        if self._repeats:
            self._kept.append(message)
            self._next += 1
        else:
            self._kept, self._next = [], 0
        return message

    def rewind(self) -> bool:
        """Begin anew, unless it is not to be repeated (any more)."""
        if not self._repeats:
            return False
        self._repeats, self._next = self._repeats - 1, 0
        return True


class _Answer:
    """What is sent to the client; a refusal in plain text is held back until it is whole."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self._ended = self._is_stream = False
        self._refusal: Message | None = None
        self._text = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            kind = _header(message, b"content-type")
            self._is_stream = kind.startswith(b"text/event-stream")
            if message["status"] >= 400 and (not kind or kind.startswith(b"text/plain")):
                self._refusal = message
                return
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
            if self._refusal is not None:
                self._text += message.get("body", b"")[: MESSAGE_LENGTH * 4]
                if self._ended:
                    await self._refuse()
                return
        await self._send(message)

    async def end(self, *, headers: list[tuple[bytes, bytes]]) -> None:
        """Say what is missing, where the application has ended before its answer has."""
        if self._ended:
            return
        if self._refusal is not None:
            await self._refuse()
        elif not self.started:
            await self._respond(503, LOST, code="no_gateway", headers=[(b"retry-after", b"1"), *headers])
        elif self._is_stream:
            event = json.dumps(_error(500, CUT, code="stream_cut"))
            await self._send({"type": "http.response.body", "body": f"data: {event}\n\n".encode()})

    async def _refuse(self) -> None:
        assert self._refusal is not None
        status, text = self._refusal["status"], self._text.decode(errors="replace").strip()
        dropped = (b"content-type", b"content-length")
        headers = [(name, value) for name, value in self._refusal["headers"] if name.lower() not in dropped]
        await self._respond(status, text or f"HTTP status {status}", code=CODES.get(status), headers=headers)

    async def _respond(
        self, status: int, message: str, *, code: str | None, headers: list[tuple[bytes, bytes]]
    ) -> None:
        body = json.dumps(_error(status, message, code=code)).encode()
        whole = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": whole})
        await self._send({"type": "http.response.body", "body": body})


def _header(message: Message, name: bytes) -> bytes:
    return next((bytes(value) for key, value in message.get("headers", ()) if key.lower() == name), b"")


def _error(status: int, message: str, *, code: str | None) -> dict[str, Any]:
    """The shape of `ApiError.body`."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message[:MESSAGE_LENGTH], "type": kind, "param": None, "code": code}}


# `X-Request-ID` as Serve's HTTP proxy logs, returns and hands on: a short name, whatever the client sent.
#
# The proxy gets the bounds of `actors/serving/proxy.py` here too. Serve calls `middlewares` in the proxy's process
# where `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it.

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "actors.serving.proxy.middlewares"
MAX_LENGTH = 100
NOT_ALLOWED = re.compile(r"[^A-Za-z0-9._:-]")


class ShortRequestId:
    """Cuts a request's `X-Request-ID` to `MAX_LENGTH` characters and replaces what is unusual in an id by `_`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = MutableHeaders(scope=scope)
            header_id = headers.get("x-request-id")
            if header_id is not None:
                headers["x-request-id"] = NOT_ALLOWED.sub("_", header_id[:MAX_LENGTH])
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve puts around its HTTP proxy, which it starts after this call."""
    bound_heads()
    return [Middleware(ProxyAnswers), Middleware(ShortRequestId)]
