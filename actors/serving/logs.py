"""Logs of the serving processes, JSON lines with the request's id; and a replica's port on loopback.

Serve's id of a request is its `X-Request-ID`, or a new id. The reply's header has it, and calls through handles pass
it on, so that the proxy, the gateway and the engine's replica log the same id.
"""

import logging

import ray
from ray.serve.schema import LoggingConfig

from cluster.ray_private import open_replica_port_at
from mbd_core.serving.api.errors import ApiError, api_error

SERVE_LOG, CORE_LOG = "ray.serve", "mbd_core"
LOGGING = LoggingConfig(encoding="JSON")


class ServeHandler(logging.Handler):
    """Hands records to Serve's log, which has a new handler whenever its configuration changes."""

    def emit(self, record: logging.LogRecord) -> None:
        serve_log = logging.getLogger(SERVE_LOG)
        if serve_log.isEnabledFor(record.levelno):
            serve_log.handle(record)


def join_core_logs() -> None:
    """Send the log of `mbd_core` in this process to Serve's log, and nowhere else."""
    core = logging.getLogger(CORE_LOG)
    core.handlers, core.propagate = [ServeHandler()], False
    core.setLevel(logging.INFO)


def log_failure(error: Exception) -> ApiError:
    """The error for the client; a server error is logged with its traceback."""
    failure = api_error(error)
    if failure.status >= 500:
        logging.getLogger(SERVE_LOG).error("request failed", exc_info=error)
    return failure


# A replica's port for calls from other replicas.
#
# On a node whose address is the loopback (`cluster/local.py`), no other machine needs the port.

LOOPBACK = "127.0.0.1"


def keep_to_loopback() -> None:
    """Call it in a replica's constructor: Serve opens the port after that."""
    if ray.util.get_node_ip_address() == LOOPBACK:
        open_replica_port_at(LOOPBACK)
