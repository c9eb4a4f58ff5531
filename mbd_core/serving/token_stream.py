"""Where a request's tokens come from: an engine in this process, or a replica in another one."""

from typing import Protocol, Self

from mbd_core.decoding.request import Request, StepOutput


class EngineFailed(RuntimeError):
    """A step raised, or the engine was stopped: nothing more will come from it."""


class ReplicaLost(RuntimeError):
    """The process that served a request is gone, or its engine has failed; another replica can go on."""


class TooManyRequests(RuntimeError):
    """As many requests wait as may wait; try again later."""


class Asleep(RuntimeError):
    """The engine's memory is given back until somebody wakes it up."""


class TokenStream(Protocol):
    """What is committed to one request, step by step; iterate to the end, or `close()` it.

    Raises `EngineFailed`, or `ReplicaLost` where another engine can go on.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> StepOutput: ...

    def close(self) -> None:
        """Abort the request, if it has not ended."""
        ...


class TokenSource(Protocol):
    """Takes requests and streams their tokens."""

    async def open(self, request: Request, *, key: str = "") -> TokenStream:
        """The stream of a request that was taken.

        Requests of different `key` (a client's) take turns where they wait. Raises `RequestRefused`,
        `TooManyRequests`, and as the stream does.
        """
        ...
