"""What a caller of the async engine gets: the steps of its requests as text, until they end or it leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from mbd_core.decoding.request import Output, Request


class EngineFailed(RuntimeError):
    """A step raised, or the engine was stopped: nothing more will come from it."""


@dataclass(frozen=True, kw_only=True)
class TextStep:
    """What one step committed for one request; `output` is set with the last. Texts join to the whole answer.

    A request that met a stop string ends with finish_reason "stop"; its tokens, log-probabilities and counts then
    include the token that completed the stop string and none after it. `logprobs` goes with `new_tokens`, where the
    request asked for it.
    """

    request_id: str
    text: str
    new_tokens: tuple[int, ...]
    output: Output | None
    logprobs: tuple[float, ...] | None = None


class TextStream:
    """The steps of one or several requests in the order they were made; iterate to the end, or `close()`.

    The engine puts steps into `queue`, or its failure; `withdraw` is how it learns that the caller has left.
    """

    def __init__(
        self, requests: Sequence[Request], stop: Sequence[str], withdraw: Callable[["TextStream"], None]
    ) -> None:
        self.requests = tuple(requests)
        self.stop = tuple(stop)
        self.queue: asyncio.Queue[TextStep | EngineFailed] = asyncio.Queue()
        self.unfinished = {r.request_id for r in requests}
        self._withdraw = withdraw

    def __aiter__(self) -> AsyncIterator[TextStep]:
        return self

    async def __anext__(self) -> TextStep:
        if not self.unfinished:
            raise StopAsyncIteration
        step = await self.queue.get()
        if isinstance(step, EngineFailed):
            self.unfinished.clear()
            raise step
        if step.output is not None:
            self.unfinished.discard(step.request_id)
        return step

    def close(self) -> None:
        """Abort what has not finished; the engine frees it before its next step. Does nothing after the end."""
        self._withdraw(self)
        self.unfinished.clear()
