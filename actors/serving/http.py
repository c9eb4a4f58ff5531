"""HTTP around the API's answers: bodies read within bounds, errors and answers as responses, the playground."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

import mbd_core.serving
from actors.serving.logs import log_failure
from mbd_core.serving.api.access import SCHEME
from mbd_core.serving.api.errors import ApiError, FieldError, clip, of_messages
from mbd_core.serving.server.answer import ServedAnswer
from mbd_core.serving.server.message_answer import MessageAnswer
from mbd_core.serving.server.response_answer import ResponseAnswer

BODY_SECONDS = 60.0  # time limit for a request's body
KEY_LENGTH = 16
AnyAnswer = ServedAnswer | ResponseAnswer | MessageAnswer


class EventStream(StreamingResponse):
    """An answer as server-sent events, one piece per step.

    The answer is closed when the response ends, even if it ends early.
    """

    def __init__(self, answer: AnyAnswer, headers: Mapping[str, str]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        groups = ("".join(group) async for group in answer.event_groups(log_failure) if group)
        super().__init__(groups, media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


def request_id(request: Request) -> str | None:
    """The request's id, which Serve's proxy gives to each request."""
    return request.headers.get("x-request-id")


def own_headers(request: Request) -> dict[str, str]:
    """`request-id` for a reply on one of Anthropic's routes, whose clients read it; no header elsewhere."""
    name = request_id(request)
    return {"request-id": name} if name and of_messages(request.url.path) else {}


def error_response(error: ApiError, request: Request) -> JSONResponse:
    """The error in the shape of the request's route."""
    body: Mapping[str, Any] = error.body
    if of_messages(request.url.path):
        body = error.message_body(request_id(request))
    return JSONResponse(body, status_code=error.status, headers={**(error.headers or {}), **own_headers(request)})


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown route, wrong method) in the API's shape."""
    assert isinstance(error, HTTPException)
    message = f"{clip(request.method)} {clip(request.url.path)}: {error.detail}"
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})), request)


HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    ApiError: _on_api_error,
    HTTPException: _on_http_error,
}


async def respond(request: Request, answer: Callable[[], Awaitable[AnyAnswer]]) -> Response:
    """The response to a generating request; every error takes the route's shape."""
    try:
        result = await answer()
        if result.streamed:
            return EventStream(result, own_headers(request))
        try:
            return JSONResponse(await result.whole(), headers=own_headers(request))
        finally:
            result.close()
    except Exception as error:  # the last line of defence: the client must not get a traceback
        return error_response(log_failure(error), request)


async def reply(request: Request, shape: Awaitable[Mapping[str, Any]]) -> Response:
    """The response of a route that generates nothing."""
    try:
        return JSONResponse(await shape, headers=own_headers(request))
    except Exception as error:
        return error_response(log_failure(error), request)


def authorization(request: Request) -> str:
    """The `Authorization` header; without it, the key of the header `x-api-key`, which Anthropic's clients send."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") or ("" if key is None else f"{SCHEME} {key}")


def client_key(request: Request) -> str:
    """The identity of a client on a server without keys: a hash of the key that the client sends, "" without a key."""
    header = authorization(request)
    return hashlib.sha256(header.encode()).hexdigest()[:KEY_LENGTH] if header else ""


def check_query(request: Request, *, allowed: Mapping[str, str]) -> None:
    """Raise `ApiError` (400) for a query parameter that `allowed` lacks or has with another value."""
    for name, value in request.query_params.items():
        if allowed.get(name) != value:
            raise FieldError(clip(name), "is not supported here", value=value, remedy="leave it out")


async def read_body(request: Request, most: int) -> bytes:
    """The body. Raises `ApiError` if it has more than `most` bytes, is compressed, late, or incomplete."""
    packed = request.headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        message = f"content-encoding: '{clip(packed)}' is not read here; send the body as it is"
        raise ApiError(415, message, code="body_encoded")
    length = request.headers.get("content-length", "")
    if len(length) > len(str(most)) or (length.isdecimal() and int(length) > most):
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise _too_large(most)
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body was complete", code="invalid_json") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s", code="timeout") from None
    return bytes(body)


def _too_large(most: int) -> ApiError:
    message = f"the body has more than {most} bytes, the most that is read here; send less at once"
    return ApiError(413, message, code="body_too_large")


# The playground's files, which are part of the package, with headers that restrict the browser to this server.

FOLDER = Path(mbd_core.serving.__file__).with_name("playground")
TYPES = {"index.html": "text/html", "playground.css": "text/css", "playground.js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


@cache
def _content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def playground_file(name: str) -> Response:
    """One of the files in `TYPES`."""
    return Response(_content(name), media_type=TYPES[name], headers=HEADERS)
