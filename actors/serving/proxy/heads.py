"""Bounds on the size and the time of a request's head, which Serve's HTTP proxy reads before any key is checked.

uvicorn keeps request lines, headers and trailers of any length, and waits for them without a limit. Serve cannot set a
limit for uvicorn, and its parser, httptools, has none. `BoundedHttp` counts the bytes as they arrive.
"""

import asyncio
from typing import Any, NamedTuple

import uvicorn.protocols.http.auto
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mbd_core.serving.api.errors import error_text

HEAD_BYTES = 32 * 2**10  # of a request line and its headers, and of trailers
NUM_HEADERS = 100  # of a request, trailers included
HEAD_SECONDS = 30.0  # from a request's first byte, or from the connection, to the end of its headers
NUM_PIPELINED = 16  # requests that may follow an unanswered request
PIECE = 4096  # bytes that are parsed between two checks of the size
LEAVE_SECONDS = 1.0  # time in which a client that still sends can read its refusal


class Refusal(NamedTuple):
    """A refusal of a head."""

    status: int
    code: str
    message: str

    def body(self, url: bytes) -> bytes:
        """The error in the shape of the URL's route; the URL is empty if it was not read yet."""
        path = url.partition(b"?")[0].decode("latin-1")
        return error_text(path, self.status, self.message, code=self.code).encode()


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
    """uvicorn's HTTP/1.1 with bounds on heads and refusals in OpenAI's form, without WebSockets."""

    url = b""  # uvicorn sets it while it parses a request

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ws_protocol_class = None
        self._unparsed = 0  # bytes received since the last piece of a body, or since the last request ended
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

    # -- the parser's callbacks ---------------------------------------------------------------------------------

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
        if size > HEAD_BYTES:  # the piece that exceeds the limit also ends the head
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
        """Called by uvicorn when its parser fails."""
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
        """Send the refusal and read no more.

        If an earlier request still waits for its answer, close without the refusal.
        """
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
        body = refusal.body(self.url)
        headers = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        lines += [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
        self.transport.write(b"".join([STATUS_LINE[refusal.status], *lines, b"\r\n", body]))
        # Closing a connection with unread bytes resets it, and some clients then drop the answer.
        self.flow.pause_reading()
        self.loop.call_later(LEAVE_SECONDS, self.transport.close)


def bound_heads() -> None:
    """Make `BoundedHttp` the HTTP protocol of uvicorn, and so of Serve, in this process."""
    uvicorn.protocols.http.auto.AutoHTTPProtocol = BoundedHttp
