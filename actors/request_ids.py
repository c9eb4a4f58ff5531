"""`X-Request-ID` as Serve's HTTP proxy logs, returns and hands on: a short name, whatever the client sent.

The proxy gets the bounds of `actors/http_heads.py` here too. Serve calls `middlewares` in the proxy's process
where `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it.
"""

import re

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.http_heads import bound_heads
from actors.proxy_answers import ProxyAnswers

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "actors.request_ids.middlewares"
MAX_LENGTH = 100
NOT_ALLOWED = re.compile(r"[^A-Za-z0-9._:-]")


class ShortRequestId:
    """Cuts a request's `X-Request-ID` to `MAX_LENGTH` characters and replaces what is unusual in an id by `_`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = MutableHeaders(scope=scope)
            given = headers.get("x-request-id")
            if given is not None:
                headers["x-request-id"] = NOT_ALLOWED.sub("_", given[:MAX_LENGTH])
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve puts around its HTTP proxy, which it starts after this call."""
    bound_heads()
    return [Middleware(ProxyAnswers), Middleware(ShortRequestId)]
