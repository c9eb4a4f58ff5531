"""The error shapes of OpenAI and of Anthropic, every error of the endpoint, and the error for each exception.

This file imports nothing slow, because Serve's HTTP proxy imports it.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mbd_core.serving.api.message_shapes import MessageError
    from mbd_core.serving.api.shapes import Error

VALUE_LENGTH = 100  # characters of a client's value that an error repeats
MESSAGE_LENGTH = 400  # characters of an error's message
AGAIN_SECONDS = 1  # `Retry-After` for a client with too many requests
ASLEEP_SECONDS = 10  # `Retry-After` of a server that sleeps


class ErrorKind(NamedTuple):
    """A kind of error: its HTTP status, its codes, and its cause."""

    status: int
    codes: tuple[str, ...]
    meaning: str


ERRORS = (
    ErrorKind(
        400,
        ("invalid_json",),
        "The body is no JSON, did not come whole, or has more than 50,000 brackets or 600,000 commas outside texts, "
        "or 100,000 quotes around keys and texts.",
    ),
    ErrorKind(400, ("missing_field", "unknown_field"), "A required field is missing, or a field does not exist."),
    ErrorKind(400, ("invalid_value",), "A field cannot be honoured, alone or beside another."),
    ErrorKind(
        400,
        ("context_length_exceeded",),
        "Prompt and answer together exceed what the model, or the KV memory, holds.",
    ),
    ErrorKind(400, ("invalid_http",), "From Serve's proxy: not a request in HTTP/1.1."),
    ErrorKind(401, ("invalid_api_key",), "An API key of this server is needed."),
    ErrorKind(403, ("not_an_administrator",), "An administrator's key is needed."),
    ErrorKind(404, ("model_not_found",), "No such model."),
    ErrorKind(404, (), "No such route."),
    ErrorKind(405, (), "The route does not take this method."),
    ErrorKind(408, ("timeout",), "The body did not arrive within 60 s, or the headers within 30 s."),
    ErrorKind(409, ("refused",), "All replicas refuse an order; nothing has changed."),
    ErrorKind(409, ("several_gateways",), "An order that lasts needs a server with one gateway."),
    ErrorKind(
        409,
        ("asleep", "no_replica"),
        "An order needs a server that is awake, or new weights a replica that runs.",
    ),
    ErrorKind(413, ("body_too_large",), "The body is larger than `--body-bytes`."),
    ErrorKind(414, ("url_too_long",), "From Serve's proxy: a URL of more than 32 KiB."),
    ErrorKind(415, ("body_encoded",), "The body has a `Content-Encoding` (gzip and the like)."),
    ErrorKind(
        429,
        ("too_many_requests",),
        "The queue is full, too many long prompts are being read, or the client has more choices under way "
        "than `--client-requests`; `Retry-After` says when to ask again.",
    ),
    ErrorKind(
        431,
        ("headers_too_large",),
        "From Serve's proxy: more than 32 KiB of request line and headers, or more than 100 headers.",
    ),
    ErrorKind(
        500,
        ("engine_failed",),
        "No replica took the request over within `--retry-seconds`, or it lost four of them.",
    ),
    ErrorKind(500, ("incomplete",), "Some replicas have not carried out an order; it may be repeated."),
    ErrorKind(500, ("internal_error",), "A defect; the server's log has it."),
    ErrorKind(
        500,
        ("stream_cut",),
        "The last event of a stream whose gateway died.",
    ),
    ErrorKind(503, ("shutting_down", "asleep"), "The server shuts down or sleeps; with `Retry-After`."),
    ErrorKind(503, ("no_replica", "no_metrics"), "Nothing answers behind the gateway, for now."),
    ErrorKind(
        503,
        ("no_gateway",),
        "From Serve's proxy: the gateway died before it answered, no gateway takes requests, or there is none. "
        "The message then says what is missing; it comes after 5 s, or after 60 s if there was a gateway before.",
    ),
    ErrorKind(503, ("aborted",), "An administrator ended the scoring of a prompt."),
    ErrorKind(504, ("timeout",), "`--request-seconds` are over."),
)


TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 501: "invalid_request_error"}
MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGE_ROUTES = ("/v1/messages", "/v1/messages/count_tokens")  # whose errors have Anthropic's shape


def of_messages(path: str) -> bool:
    """Whether a path's errors have Anthropic's shape: all paths below its route, such as `/v1/messages/batches`.

    `path` may begin with the application's prefix.
    """
    return f"{MESSAGE_ROUTES[0]}/" in f"{path}/"


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> "Error":
    """OpenAI's error object."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def message_error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None, request_id: str | None = None
) -> "MessageError":
    """Anthropic's error object; its `details` have the code and the field of OpenAI's error object."""
    kind = MESSAGE_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "details": {"error_code": code, "param": param}},
        "request_id": request_id,
    }


def error_text(path: str, status: int, message: str, *, code: str | None, request_id: str | None = None) -> str:
    """The error of a route as JSON, in the route's shape."""
    body: Mapping[str, Any] = error_body(status, message, code=code)
    if of_messages(path):
        body = message_error_body(status, message, code=code, request_id=request_id)
    return json.dumps(body, separators=(",", ":"))


def clip(value: str, length: int = VALUE_LENGTH) -> str:
    """A client's value for an error message: its first `length` characters, then "..." if there are more."""
    return value if len(value) <= length else f"{value[:length]}..."


def value_text(value: Any) -> str:
    """A value of a body for an error message.

    Lists, objects and huge numbers are not shown: printing them takes long.
    """
    if isinstance(value, str):
        return clip(json.dumps(clip(value)))
    if isinstance(value, list | dict) or (isinstance(value, int) and value.bit_length() > 64):
        return "this value"
    return json.dumps(value)


class ApiError(Exception):
    """An error for the client: the HTTP status, and the fields of `{"error": ...}`.

    `message` and `param` are cut to a bounded length, because they may hold a client's whole value.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = clip(message, MESSAGE_LENGTH)
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers
        self.param = None if param is None else clip(param)

    @property
    def body(self) -> "Error":
        return error_body(self.status, self.message, param=self.param, code=self.code)

    def message_body(self, request_id: str | None = None) -> "MessageError":
        """The body in Anthropic's shape."""
        return message_error_body(self.status, self.message, param=self.param, code=self.code, request_id=request_id)


class FieldError(ApiError, ValueError):
    """The refusal of a request's field (400): its name, its value, the reason, and the remedy.

    Being a `ValueError`, it may be raised in a pydantic validator; `parse` then raises it unchanged.
    """

    def __init__(
        self, field: str, why: str, *, value: Any = None, remedy: str = "", code: str = "invalid_value"
    ) -> None:
        text = "" if value is None else f"{value_text(value)} "
        advice = f"; {remedy}" if remedy else ""
        super().__init__(400, f"{field}: {text}{why}{advice}", param=field, code=code)


def api_error(error: Exception) -> ApiError:
    """The client's error for an exception. An unexpected exception becomes a 500 without details."""
    from mbd_core.engine.sequences.admission import RequestRefused
    from mbd_core.serving.tokens.stream import Asleep, EngineFailed, ReplicaLost, RequestTimedOut, TooManyRequests

    if isinstance(error, ApiError):
        return error
    if isinstance(error, TooManyRequests):
        return ApiError(429, str(error), code="too_many_requests", headers={"Retry-After": str(AGAIN_SECONDS)})
    if isinstance(error, Asleep):
        return ApiError(503, str(error), code="asleep", headers={"Retry-After": str(ASLEEP_SECONDS)})
    if isinstance(error, RequestRefused):
        return ApiError(400, str(error), code=error.code)
    if isinstance(error, RequestTimedOut):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, EngineFailed | ReplicaLost):
        return ApiError(500, "the engine failed; this replica is being replaced", code="engine_failed")
    return ApiError(500, "internal error; see the server's log", code="internal_error")
