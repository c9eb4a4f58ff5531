"""Gives errors the API's form: the errors of Serve's HTTP proxy, and the ends of requests whose gateway died.

  a gateway dies before any answer    the request goes to another gateway, at most `REPEATS` times; the answer is 503
                                      `no_gateway` if that fails, or if the request is an order or has a large body
  a gateway dies within a stream      the stream's last event is an error
  the proxy refuses in plain text     the refusal becomes an error object with the same status

Without this, a client gets "Internal Server Error" in the first case and a closed connection in the second. Other
answers, and Serve's own routes (`/-/healthz`), pass through unchanged.
"""

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mbd_core.serving.api.errors import MESSAGE_LENGTH, MESSAGE_ROUTES, error_text, of_messages

REPEATS = 1  # few, because a request that kills gateways must not kill all of them
PAUSE = 0.2  # seconds before a repetition
KEPT_BYTES = 2**20  # larger bodies are not kept for a repetition
OWN_ROUTES = "/-/"
REPEATABLE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    *MESSAGE_ROUTES,
    "/tokenize",
    "/detokenize",
)  # routes of POST that may be repeated, unlike orders
CODES = {408: "timeout", 429: "too_many_requests", 503: "no_gateway"}
LOST = "the gateway of this request died before it answered; ask again"
ORDER_LOST = (
    "the gateway of this order died before it answered; the order may have been carried out: look before you repeat it"
)
CUT = (
    "the stream was cut, because its gateway died; a stream asked for with resumable=true goes on by the field resume"
)


class ProxyAnswers:
    """The middleware, around Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        request, answer = _KeptRequest(scope, receive), _Answer(send, scope["path"])
        while True:
            tried = {**scope, "headers": list(scope["headers"])}
            await self._app(tried, request.receive, answer.send)
            if answer.started or request.client_left or not request.rewind():
                break
            await asyncio.sleep(PAUSE)
        if not request.client_left:
            await answer.end(
                is_order=request.is_order,
                headers=[pair for pair in tried["headers"] if pair[0].lower() == b"x-request-id"],
            )


class _KeptRequest:
    """A request that keeps its body for a repetition, if the route may be repeated and the body is small."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive, self._kept, self._next = receive, list[Message](), 0
        self.is_order = scope["method"] == "POST" and not scope["path"].endswith(REPEATABLE)
        self._repeats = 0 if self.is_order else REPEATS
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
        """Start over. Returns false if the request may not be repeated (again)."""
        if not self._repeats:
            return False
        self._repeats, self._next = self._repeats - 1, 0
        return True


class _Answer:
    """Sends an answer to the client; a refusal in plain text is held back until it is complete."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
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

    async def end(self, *, is_order: bool, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends an error if the application returned before an answer, or within a stream."""
        if self._ended:
            return
        if self._refusal is not None:
            await self._refuse()
        elif not self.started:
            again = [] if is_order else [(b"retry-after", b"1")]
            text = ORDER_LOST if is_order else LOST
            await send_error(self._send, self._path, 503, text, code="no_gateway", headers=[*again, *headers])
        elif self._is_stream:
            error = error_text(self._path, 500, CUT, code="stream_cut", request_id=_id(headers))
            kind = "event: error\n" if of_messages(self._path) else ""
            await self._send({"type": "http.response.body", "body": f"{kind}data: {error}\n\n".encode()})

    async def _refuse(self) -> None:
        assert self._refusal is not None
        status, text = self._refusal["status"], self._text.decode(errors="replace").strip()
        dropped = (b"content-type", b"content-length")
        headers = [(name, value) for name, value in self._refusal["headers"] if name.lower() not in dropped]
        message = text or f"HTTP status {status}"
        await send_error(self._send, self._path, status, message, code=CODES.get(status), headers=headers)


async def send_error(
    send: Send, path: str, status: int, message: str, *, code: str | None, headers: Sequence[tuple[bytes, bytes]]
) -> None:
    """Sends a whole answer that is an error of the API; a long message is cut."""
    request_id = _id(headers)
    if request_id is not None and of_messages(path):
        headers = [*headers, (b"request-id", request_id.encode("latin-1"))]
    body = error_text(path, status, message[:MESSAGE_LENGTH], code=code, request_id=request_id).encode()
    whole = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": whole})
    await send({"type": "http.response.body", "body": body})


def _id(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The request's id, if the headers have it."""
    return next((value.decode("latin-1") for name, value in headers if name.lower() == b"x-request-id"), None)


def _header(message: Message, name: bytes) -> bytes:
    return next((bytes(value) for key, value in message.get("headers", ()) if key.lower() == name), b"")
