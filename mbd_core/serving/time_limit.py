"""The time that one API request may take, from its arrival to the end of its answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestTimedOut(RuntimeError):
    """The time limit of a request is over."""


class TimeLimit:
    """`seconds` from now on, for everything that a request waits for; `None`: no limit. Made in the event loop."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Cancel what is awaited inside once the time is over, and raise `RequestTimedOut`."""
        try:
            async with asyncio.timeout_at(self._end) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise RequestTimedOut(f"the request was not answered within {self._seconds:g} s") from None
