"""Streams of tokens, their sources and errors, and the time that a request may take."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, Self

from mbd_core.decoding.blocks.request import Request, StepOutput


class EngineFailed(RuntimeError):
    """A step raised, or the engine was stopped; it gives no more tokens."""


class ReplicaLost(RuntimeError):
    """A request's replica is gone, or its engine has failed; another replica can continue the request."""


class TooManyRequests(RuntimeError):
    """The queue of waiting requests is full; try again later."""


class Asleep(RuntimeError):
    """The engine sleeps, with its memory freed, until `/wakeup`."""


class TokenStream:
    """The steps of one request; iterate to the end, or `close()` it.

    Raises `EngineFailed`, or `ReplicaLost` if another engine can continue.
    """

    def __init__(self, steps: AsyncIterator[StepOutput], abort: Callable[[], None]) -> None:
        """`abort` ends the request early."""
        self._steps, self._abort, self._ended = steps, abort, False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        if self._ended:
            raise StopAsyncIteration
        step = await anext(self._steps)
        self._ended = step.output is not None
        return step

    def close(self) -> None:
        """Abort the request; does nothing after its end."""
        if not self._ended:
            self._ended = True
            self._abort()


class TokenSource(Protocol):
    """Takes requests and streams their tokens."""

    async def open(self, request: Request, *, key: str = "") -> TokenStream:
        """The stream of an accepted request.

        `key` names the client; waiting clients take turns. Raises `RequestRefused`, `TooManyRequests`, and the
        stream's errors.
        """
        ...


class RequestTimedOut(RuntimeError):
    """The time limit of a request is over."""


class TimeLimit:
    """A limit of `seconds` from now on for everything that an API request waits for; `None`: no limit.

    Made in the event loop.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Cancels the awaited call inside once the time is over, and raises `RequestTimedOut`."""
        try:
            async with asyncio.timeout_at(self._end) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise RequestTimedOut(f"the request was not answered within {self._seconds:g} s") from None
