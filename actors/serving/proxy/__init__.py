"""Serve's HTTP proxy: limits on request lines and headers, a 503 after a short wait where no gateway runs, errors in
the API's form, short request ids.

Serve calls `middlewares` in the proxy's process if `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it. Nothing here
imports PyTorch, which would slow the proxy's start.
"""

import re

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.serving.proxy.answers import ProxyAnswers
from actors.serving.proxy.heads import bound_heads
from actors.serving.proxy.waiting import RefusedWithoutGateway

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "actors.serving.proxy.middlewares"
MAX_LENGTH = 100
NOT_ALLOWED = re.compile(r"[^A-Za-z0-9._:-]")


class ShortRequestId:
    """Cuts a request's `X-Request-ID` to `MAX_LENGTH` characters and replaces unusual characters by `_`."""

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
    """The middlewares of Serve's HTTP proxy. Limits request lines and headers in this process, too: Serve calls this
    before its proxy starts."""
    bound_heads()
    return [Middleware(ProxyAnswers), Middleware(RefusedWithoutGateway), Middleware(ShortRequestId)]
