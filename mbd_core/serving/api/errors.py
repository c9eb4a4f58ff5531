"""OpenAI's error shape, and which of our exceptions becomes which error."""

from typing import Any

from mbd_core.serving.tokens.stream import Asleep, EngineFailed, ReplicaLost, RequestTimedOut, TooManyRequests

VALUE_LENGTH = 100  # characters of a client's value that an error repeats
MESSAGE_LENGTH = 400  # characters of an error's message
AGAIN_SECONDS = 1  # after which a client may ask again that had too much under way
ASLEEP_SECONDS = 10  # after which a client may ask a server again that sleeps


def clipped(value: str, length: int = VALUE_LENGTH) -> str:
    """A client's value as an error repeats it: its first `length` characters, then "..." if there are more."""
    return value if len(value) <= length else f"{value[:length]}..."


class ApiError(Exception):
    """An error as the client sees it: HTTP status, and what goes into `{"error": ...}`.

    `message` and `param` are cut to a bounded length here, in case a client's value stands in them whole.
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
        message = clipped(message, MESSAGE_LENGTH)
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers
        self.param = None if param is None else clipped(param)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            429: "rate_limit_error",
            500: "server_error",
            503: "server_error",
            504: "server_error",
        }
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """The error that a client sees for an exception; an unexpected one is a 500 that reveals nothing of it."""
    from mbd_core.engine.admission import RequestRefused

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
