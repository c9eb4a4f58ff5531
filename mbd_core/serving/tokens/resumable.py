"""Streams that outlive their replica: the committed tokens are kept, and another replica continues.

A request for the rest carries the committed tokens of the answer (`Request.committed`). The next engine stores them
like a prompt and decodes from there, with the same seed and limits. Uncommitted tokens are decoded again; the client
has not seen them. A canvas and a record of experts cannot resume in the middle: their request begins anew, and tokens
that the client has are not repeated.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from mbd_core.decoding.blocks.request import Request, StepOutput
from mbd_core.serving.tokens.joined import JoinedAnswer
from mbd_core.serving.tokens.stream import EngineFailed, ReplicaLost, TokenSource, TokenStream, TooManyRequests

MAX_LOSSES = 3  # losses of one request: a request that breaks every engine must end
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts to find a replica, doubled each time


class ResumingSource:
    """Replicas as one source that does not lose a request.

    After the loss of its replica a request is tried at other replicas for `retry_seconds`, even while all replicas are
    full, because the request was accepted. `on_loss` is called after each loss, once the request runs again or has
    failed. If the client leaves during the search, the request is cancelled, and `on_loss` is not called.
    """

    def __init__(
        self, replicas: TokenSource, *, retry_seconds: float, on_loss: Callable[[], None] = lambda: None
    ) -> None:
        self._replicas, self._retry_seconds, self._on_loss = replicas, retry_seconds, on_loss

    async def open(self, request: Request, *, key: str = "") -> TokenStream:
        """The stream of a request; it raises `EngineFailed` if no replica continues. Raises the replicas' refusals."""
        resumption = _Resumption(
            request, self._replicas, key, retry_seconds=self._retry_seconds, on_loss=self._on_loss
        )
        await resumption.begin()
        return TokenStream(resumption.steps(), resumption.close)


class _Resumption:
    """A request's steps, from one replica after another, without repeated tokens."""

    def __init__(
        self, request: Request, replicas: TokenSource, key: str, *, retry_seconds: float, on_loss: Callable[[], None]
    ) -> None:
        self._request, self._replicas, self._key = request, replicas, key
        self._retry_seconds, self._on_loss = retry_seconds, on_loss
        self._stream: TokenStream | None = None
        self._answer = JoinedAnswer(request)  # what the reader has
        self._repeats: tuple[int, ...] = ()  # tokens that the reader has and a restarted request will repeat
        self._num_losses = 0

    async def begin(self) -> None:
        """Submit the request; if its first replica is lost meanwhile, try another replica."""
        try:
            self._stream = await self._replicas.open(self._request, key=self._key)
        except ReplicaLost as loss:
            await self._go_on(loss)

    async def steps(self) -> AsyncIterator[StepOutput]:
        while True:
            assert self._stream is not None, "begin() comes first"
            try:
                async for step in self._stream:
                    joined = self._answer.add(self._without_repeats(step))
                    if joined.commits or joined.frame is not None:
                        yield joined
                return
            except ReplicaLost as loss:
                await self._go_on(loss)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    async def _go_on(self, loss: ReplicaLost) -> None:
        """Submit the rest of the request to another replica. Raises `EngineFailed` if no replica accepts it in
        time."""
        self._num_losses += 1
        try:
            self._stream = await self._elsewhere(loss)
        except Exception:  # not `CancelledError`, with which a client leaves
            self._on_loss()
            raise
        self._on_loss()

    async def _elsewhere(self, loss: ReplicaLost) -> TokenStream:
        if self._num_losses > MAX_LOSSES:
            raise EngineFailed(f"{self._num_losses} replicas were lost under this request") from loss
        continuation, pause = self._continuation(), FIRST_PAUSE
        try:
            async with asyncio.timeout(self._retry_seconds):
                while True:
                    try:
                        return await self._replicas.open(continuation, key=self._key)
                    except (ReplicaLost, TooManyRequests):
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, LONGEST_PAUSE)
        except TimeoutError:
            raise EngineFailed(f"no replica took the request over within {self._retry_seconds:g} s") from loss

    def _continuation(self) -> Request:
        request = self._request
        begins_anew = request.decoding.canvas is not None or request.scored or request.experts
        if begins_anew:
            self._repeats = self._answer.piece.tokens
        return self._answer.next_request(from_the_start=begins_anew)

    def _without_repeats(self, step: StepOutput) -> StepOutput:
        number = min(len(self._repeats), len(step.piece))
        if step.piece.tokens[:number] != self._repeats[:number]:
            raise EngineFailed("the answer began anew on another replica and came out otherwise; ask again")
        self._repeats = self._repeats[number:]
        return replace(step, piece=step.piece[number:])
