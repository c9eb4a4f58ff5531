"""The API requests of a server that have not been answered, and its drain: it takes no more and finishes these."""

import asyncio
from collections.abc import Callable
from functools import partial

from mbd_core.serving.openai_errors import ApiError
from mbd_core.serving.token_stream import TooManyRequests

DRAIN_SECONDS = 30.0  # that a drain may take, unless somebody says otherwise
RETRY_SECONDS = 10  # a server that shuts down is replaced or started again, which takes a while


class OpenRequests:
    """Requests from `begin` until the function that it returned is called. All methods belong to one event loop."""

    def __init__(self, *, most_each: int | None = None) -> None:
        """`most_each`: how many a client may have open; `None`, and for clients without a name: any number."""
        self._most_each = most_each
        self._open: dict[object, str] = {}
        self._draining = False
        self._drained = asyncio.Event()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def begin(self, client: str = "") -> Callable[[], None]:
        """Count a client's new request; call the result when its answer ends.

        Raises `ApiError` (503) while draining, and `TooManyRequests` for a client that has as many as it may.
        """
        if self._draining:
            raise ApiError(
                503,
                "the server is shutting down and takes no more requests; try again later",
                code="shutting_down",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        if client and self._most_each is not None and list(self._open.values()).count(client) >= self._most_each:
            raise TooManyRequests(f"{self._most_each} requests of this API key are under way, as many as may be")
        request = object()
        self._open[request] = client
        return partial(self._end, request)

    def begin_drain(self) -> int:
        """Take no more requests; how many are open."""
        self._draining = True
        self._note_the_end()
        return len(self._open)

    async def drained(self, seconds: float) -> int:
        """Wait until no request is open, for `seconds` at most; how many still are. Call `begin_drain` first."""
        try:
            async with asyncio.timeout(seconds):
                await self._drained.wait()
        except TimeoutError:
            pass
        return len(self._open)

    def _end(self, request: object) -> None:
        self._open.pop(request, None)
        self._note_the_end()

    def _note_the_end(self) -> None:
        if self._draining and not self._open:
            self._drained.set()
