"""Logs of the serving processes: JSON lines, each with the request's id where there is a request.

Serve's id of a request is its `X-Request-ID`, else one of its own; it stands in the reply's header, and a call through
a handle takes it along, so that the proxy, the gateway and the engine's replica log one id.
"""

import logging

from ray.serve.schema import LoggingConfig

from mbd_core.serving.openai_errors import ApiError, api_error

SERVE_LOG, CORE_LOG = "ray.serve", "mbd_core"
LOGGING = LoggingConfig(encoding="JSON")


class ServeHandler(logging.Handler):
    """Hands records to Serve's log, which has a new handler whenever its configuration changes."""

    def emit(self, record: logging.LogRecord) -> None:
        serve_log = logging.getLogger(SERVE_LOG)
        if serve_log.isEnabledFor(record.levelno):
            serve_log.handle(record)


def join_core_logs() -> None:
    """What `mbd_core` logs in this process goes to Serve's log, and nowhere else."""
    core = logging.getLogger(CORE_LOG)
    core.handlers, core.propagate = [ServeHandler()], False
    core.setLevel(logging.INFO)


def logged(error: Exception) -> ApiError:
    """The error that the client sees; a failure of ours goes to the log with its traceback."""
    seen = api_error(error)
    if seen.status >= 500:
        logging.getLogger(SERVE_LOG).error("request failed", exc_info=error)
    return seen
