"""OpenAI's error shape, and which of our exceptions becomes which error."""

from typing import Any

from mbd_core.serving.async_engine import TooManyRequests
from mbd_core.serving.text_stream import EngineFailed


class ApiError(Exception):
    """An error as the client sees it: HTTP status, and what goes into `{"error": ...}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """The error that a client sees for an exception; an unexpected one is a 500 that reveals nothing of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TooManyRequests):
        return ApiError(429, str(error), code="too_many_requests", headers={"Retry-After": "1"})
    if isinstance(error, EngineFailed):
        return ApiError(500, "the engine failed; this replica is being replaced", code="engine_failed")
    return ApiError(500, "internal error; see the server's log", code="internal_error")
