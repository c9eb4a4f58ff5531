"""What an API request gets: the steps of its choices as text, until they end or its client leaves."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Self

from mbd_core.decoding.blocks.request import Frame, Output, Request, Rollout, StepOutput
from mbd_core.serving.text.committed import CommittedText
from mbd_core.serving.tokens.stream import FairTurns, TimeLimit, TokenSource, TokenStream, TooManyRequests, has_room

MAX_UNREAD_FRAMES = 64  # of one API request


@dataclass(frozen=True, kw_only=True)
class TextStep:
    """What one step committed for one request; `output` is set with the last. Texts join to the whole answer; `pieces`
    are what each of the new tokens made certain of it, in the first place of the text.

    A request that met a stop string ends with finish_reason "stop"; its tokens, log-probabilities and counts then
    include the token that completed the stop string and none after it. `logprobs` and `rollout` go with `new_tokens`,
    where the request asked for them, as does `frame`, which the step's forward left. `weights` are as in `StepOutput`,
    `num_forwards` those of its request so far.
    """

    request_id: str
    text: str
    new_tokens: tuple[int, ...]
    output: Output | None
    logprobs: tuple[float, ...] | None = None
    rollout: Rollout | None = None
    frame: Frame | None = None
    weights: tuple[int, int] = (0, 0)
    pieces: tuple[str, ...] = ()
    num_forwards: int = 0


class TextStream:
    """The steps of one or several requests in the order they come; iterate to the end, or `close()`.

    Raises what the requests' token streams raise, and `RequestTimedOut` at the end of `limit`. Where nobody reads for
    a while, frames beyond `MAX_UNREAD_FRAMES` are dropped, and nothing else.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        streams: Sequence[TokenStream],
        *,
        texts: Sequence[CommittedText],
        limit: TimeLimit | None = None,
    ) -> None:
        """`streams` are those of `requests`, `texts` the text of each so far."""
        self.requests = tuple(requests)
        self.unfinished = {r.request_id for r in requests}
        self._streams, self._limit = tuple(streams), limit or TimeLimit(None)
        self._queue: asyncio.Queue[TextStep | Exception] = asyncio.Queue()
        self._unread_frames = 0
        self._tasks = [
            asyncio.create_task(self._read(_AnswerText(request, text), stream))
            for request, text, stream in zip(self.requests, texts, self._streams, strict=True)
        ]

    @classmethod
    async def open(
        cls,
        source: TokenSource,
        requests: Sequence[Request],
        *,
        texts: Sequence[CommittedText],
        key: str = "",
        turns: FairTurns | None = None,
        limit: TimeLimit | None = None,
    ) -> Self:
        """Submit `requests`, all or none, each in one of `turns`; raises as `TokenSource.open` does, and
        `RequestTimedOut`."""
        limit = limit or TimeLimit(None)

        async def opened(request: Request) -> TokenStream:
            async with turns.turn((key, request.group)) if turns else nullcontext():
                return await source.open(request, key=key)

        opening = [asyncio.ensure_future(opened(request)) for request in requests]
        try:
            async with limit.watch():
                streams = await asyncio.gather(*opening)
        except BaseException:
            await _close_opened(opening)
            raise
        return cls(requests, streams, texts=texts, limit=limit)

    def __aiter__(self) -> AsyncIterator[TextStep]:
        return self

    async def __anext__(self) -> TextStep:
        if not self.unfinished:
            raise StopAsyncIteration
        try:
            async with self._limit.watch():
                step = await self._queue.get()
            if isinstance(step, Exception):
                raise step
        except Exception:
            self.close()
            raise
        self._unread_frames -= step.frame is not None
        if step.output is not None:
            self.unfinished.discard(step.request_id)
        return step

    def close(self) -> None:
        """Abort what has not finished; the engine frees it before its next step. Does nothing after the end."""
        self.unfinished.clear()
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            stream.close()

    async def _read(self, answer: "_AnswerText", stream: TokenStream) -> None:
        """Put one request's steps into the queue, up to its end or a stop string."""
        try:
            async for step in stream:
                self._put(done := answer.add(step))
                if done.output is not None:
                    return
        except Exception as error:
            self._queue.put_nowait(error)
        finally:
            stream.close()

    def _put(self, step: TextStep) -> None:
        if step.frame is not None and self._unread_frames >= MAX_UNREAD_FRAMES:
            step = replace(step, frame=None)
        self._unread_frames += step.frame is not None
        self._queue.put_nowait(step)


class _AnswerText:
    """One request's answer so far, as tokens and as text."""

    def __init__(self, request: Request, text: CommittedText) -> None:
        self._request, self._text = request, text
        self._tokens = list(request.committed)
        self._logprobs: list[float] = []
        self._rollout = Rollout() if request.rollout else None

    def add(self, step: StepOutput) -> TextStep:
        """The step's text; the request ends with it where a stop string is complete."""
        pieces: list[str] = []
        num_earlier = self._text.num_tokens
        for token in step.new_tokens:
            pieces.append(self._text.push(token))
            if self._text.stopped:
                break
        output = step.output
        rest = "" if output is None else self._text.finish()
        num_new = self._text.num_tokens - num_earlier
        logprobs = None if step.logprobs is None else step.logprobs[:num_new]
        rollout = step.rollout
        if rollout is not None and num_new < len(step.new_tokens):
            end = len(self._request.prompt) + len(self._tokens) + num_new
            rollout = rollout.cut(step.new_tokens, num_new, room=self._request.rest_of_block(end))
        if rollout is not None and self._rollout is not None:
            self._rollout = self._rollout.then(rollout)
        self._tokens += step.new_tokens[:num_new]
        self._logprobs += logprobs or ()
        if self._text.stopped:
            output = Output(
                request_id=self._request.request_id,
                tokens=tuple(self._tokens),
                finish_reason="stop",
                counts=replace(step.counts, num_tokens=len(self._tokens)),
                logprobs=tuple(self._logprobs) if self._request.logprobs else None,
                rollout=self._rollout,
            )
        return TextStep(
            request_id=self._request.request_id,
            text="".join(pieces) + rest,
            new_tokens=step.new_tokens[:num_new],
            output=output,
            logprobs=logprobs,
            rollout=rollout,
            frame=step.frame,
            weights=step.weights,
            pieces=tuple(pieces),
            num_forwards=step.counts.num_forwards,
        )


async def _close_opened(opening: "Sequence[asyncio.Future[TokenStream]]") -> None:
    """Close the streams that were opened, those included that are just about to be."""
    for one in opening:
        one.cancel()
    for done in await asyncio.gather(*opening, return_exceptions=True):
        if not isinstance(done, BaseException):
            with suppress(Exception):
                done.close()


class OpenChoices:
    """The choices of a model that a server has opened at its engines and that have not ended, by client.

    What the engines would refuse is refused here, before any of a body's choices is sent to them.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: how many all engines together take."""
        self._capacity = capacity
        self._opening: Counter[str] = Counter()
        self._opened: dict[TextStream, str] = {}

    def check(self, client: str, number: int) -> None:
        """Raise `TooManyRequests` where a client gets no `number` choices more."""
        self._opened = {stream: owner for stream, owner in self._opened.items() if stream.unfinished}
        taken = self._opening.copy()
        for stream, owner in self._opened.items():
            taken[owner] += len(stream.unfinished)
        if not has_room(taken, client, number, capacity=self._capacity):
            raise TooManyRequests(f"{taken.total()} choices are running or waiting; try again later")

    @contextmanager
    def opening(self, client: str, number: int) -> Iterator[None]:
        """Count `number` choices as long as the block lasts, which opens them; raises as `check`."""
        self.check(client, number)
        self._opening[client] += number
        try:
            yield
        finally:
            self._opening[client] -= number
            if not self._opening[client]:
                del self._opening[client]

    def add(self, client: str, stream: TextStream) -> None:
        """Count a stream until it has ended."""
        self._opened[stream] = client
