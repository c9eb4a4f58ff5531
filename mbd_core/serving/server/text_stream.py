"""What an API request gets: the steps of its choices as text, until they end or its client leaves."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Self

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.answers.slots import Frame
from mbd_core.decoding.blocks.request import Output, Request, StepOutput
from mbd_core.serving.text.committed import CommittedText
from mbd_core.serving.tokens.stream import FairTurns, TimeLimit, TokenSource, TokenStream, TooManyRequests, has_room

MAX_UNREAD_FRAMES = 64  # of one API request
NUM_OPENING, OPENING_SECONDS = 2, 0.25  # choices on their way to the engines, and how long each counts as that
AGAIN_SECONDS = 1.0  # between two attempts to open a choice whose body has others under way


@dataclass(frozen=True, kw_only=True)
class TextStep:
    """What one step committed for one request; `output` is set with the last. Texts join to the whole answer.

    A request that met a stop string ends with finish_reason "stop"; its tokens, log-probabilities and counts then
    include the token that completed the stop string and none after it.

    piece         the new tokens; `tail`, `frame` and `weights` mean the same as in `StepOutput`
    texts         the text that each new token made certain; the step's own `text` begins with them
    num_forwards  forwards of its request so far
    """

    request_id: str
    text: str
    piece: Piece
    output: Output | None
    tail: Piece = Piece()
    frame: Frame | None = None
    weights: tuple[int, int] = (0, 0)
    texts: tuple[str, ...] = ()
    num_forwards: int = 0

    def by_tokens(self) -> Iterator["TextStep"]:
        """The step in parts of one token each, which join to the step; the last part has its end."""
        last = len(self.piece) - 1
        if last < 1:
            yield self
            return
        rest = self.text[sum(map(len, self.texts)) :]
        for i, text in enumerate(self.texts):
            part = replace(self, text=text, piece=self.piece[i : i + 1], texts=(text,))
            yield replace(part, output=None, tail=Piece()) if i < last else replace(part, text=text + rest)


class TextStream:
    """The steps of one or several requests in the order they come; iterate to the end, or `close()`.

    Raises what the requests' token streams raise, and `RequestTimedOut` at the end of `limit`. Where nobody reads for
    a while, frames beyond `MAX_UNREAD_FRAMES` are dropped, and nothing else.
    """

    def __init__(
        self,
        source: TokenSource,
        requests: Sequence[Request],
        *,
        texts: Sequence[CommittedText],
        key: str = "",
        places: "ClientPlaces | None" = None,
        limit: TimeLimit | None = None,
        waits: bool = False,
    ) -> None:
        """Submit `requests` of the client `key`, as its `places` allow; `texts` are the text of each so far."""
        self.requests = tuple(requests)
        self.unfinished = {r.request_id for r in requests}
        self._source, self._key, self._limit, self._waits = source, key, limit or TimeLimit(None), waits
        self._queue: asyncio.Queue[TextStep | Exception] = asyncio.Queue()
        self._unread_frames = 0
        num_first = len(requests) if places is None else 1  # the others may wait long for a place
        self._first: list[asyncio.Future[None]] = [
            asyncio.get_running_loop().create_future() for _ in self.requests[:num_first]
        ]
        self._tasks = [
            asyncio.create_task(self._answer(request, text, places, future))
            for request, text, future in zip_longest(self.requests, texts, self._first)
        ]

    @classmethod
    async def open(
        cls,
        source: TokenSource,
        requests: Sequence[Request],
        *,
        texts: Sequence[CommittedText],
        key: str = "",
        places: "ClientPlaces | None" = None,
        limit: TimeLimit | None = None,
        waits: bool = False,
    ) -> Self:
        """A stream whose requests the source has taken, all or none; with `places` the first of them, and the others
        wait where there is no room. With `waits` every one waits. Raises as `TokenSource.open` does, and
        `RequestTimedOut`."""
        stream = cls(source, requests, texts=texts, key=key, places=places, limit=limit, waits=waits)
        try:
            async with stream._limit.watch():
                await asyncio.gather(*stream._first)
        except BaseException:
            stream.close()
            await asyncio.gather(*stream._tasks, return_exceptions=True)
            raise
        return stream

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
        """Aborts the unfinished requests; the engine frees them before its next step. Does nothing after the end."""
        self.unfinished.clear()
        for task in self._tasks:
            task.cancel()

    async def _answer(
        self,
        request: Request,
        text: CommittedText,
        places: "ClientPlaces | None",
        opening: "asyncio.Future[None] | None",
    ) -> None:
        """Submits one request, and puts its steps into the queue, up to its end or a stop string. `opened` is set if
        `open` waits for the request."""
        try:
            async with nullcontext() if places is None else places.place(self._key, request.group):
                stream = await self._open(request, places, waits=self._waits or opening is None)
                try:
                    if opening is not None:
                        opening.set_result(None)
                    answer = _AnswerText(request, text)
                    async for step in stream:
                        self._put(text_step := answer.add(step))
                        if text_step.output is not None:
                            return
                finally:
                    stream.close()
        except Exception as error:
            if opening is None or opening.done():
                self._queue.put_nowait(error)
            else:
                opening.set_exception(error)

    async def _open(self, request: Request, places: "ClientPlaces | None", *, waits: bool) -> TokenStream:
        """The request's stream; a request that `waits` asks again while the engines have no room."""
        while True:
            try:
                async with nullcontext() if places is None else places.opening(self._key, request.group):
                    return await self._source.open(request, key=self._key)
            except TooManyRequests:
                if not waits:
                    raise
            await asyncio.sleep(AGAIN_SECONDS)

    def _put(self, step: TextStep) -> None:
        if step.frame is not None and self._unread_frames >= MAX_UNREAD_FRAMES:
            step = replace(step, frame=None)
        self._unread_frames += step.frame is not None
        self._queue.put_nowait(step)


class _AnswerText:
    """One request's answer so far, as tokens and as text."""

    def __init__(self, request: Request, text: CommittedText) -> None:
        self._request, self._text = request, text
        self._answer = request.nothing

    def add(self, step: StepOutput) -> TextStep:
        """The step's text; a complete stop string ends the request."""
        request, output, texts = self._request, step.output, list[str]()
        num_earlier = self._text.num_tokens
        for token in step.piece.tokens:
            texts.append(self._text.push(token))
            if self._text.stopped:
                break
        rest = "" if output is None else self._text.finish()
        num_new = self._text.num_tokens - num_earlier
        piece, tail = step.piece[:num_new], step.tail
        if request.has_rollout and num_new < len(step.piece):
            end = len(request.prompt) + len(request.committed) + len(self._answer) + num_new
            tail = (step.piece + step.tail)[num_new : num_new + request.rest_of_block(end)]
        self._answer += piece
        if self._text.stopped:
            output = Output(
                request_id=request.request_id,
                finish_reason="stop",
                stop_reason=self._text.stop,
                counts=replace(step.counts, num_tokens=len(request.committed) + len(self._answer)),
                piece=self._answer,
                tail=tail,
                committed=request.committed,
            )
        return TextStep(
            request_id=request.request_id,
            text="".join(texts) + rest,
            piece=piece,
            output=output,
            tail=tail,
            frame=step.frame,
            weights=step.weights,
            texts=tuple(texts),
            num_forwards=step.counts.num_forwards,
        )


class ClientPlaces:
    """How many choices of each client the engines know at once; its others wait here, where they cost nothing.

    On their way to the engines all clients take turns, and so do the bodies of each.
    """

    def __init__(self, most_each: int) -> None:
        self.most_each = most_each
        self._turns = FairTurns(NUM_OPENING, seconds=OPENING_SECONDS)
        self._places: dict[str, FairTurns] = {}
        self._choices: Counter[str] = Counter()  # that have a place, or wait for one

    @asynccontextmanager
    async def place(self, client: str, group: str) -> AsyncIterator[None]:
        """Wait for one of a client's places, and hold it as long as the block lasts."""
        places = self._places.setdefault(client, FairTurns(self.most_each))
        self._choices[client] += 1
        try:
            async with places.turn((group,)):
                yield
        finally:
            self._choices[client] -= 1
            if not self._choices[client]:
                del self._choices[client], self._places[client]

    def opening(self, client: str, group: str) -> AbstractAsyncContextManager[None]:
        """The turn of a choice that goes to the engines."""
        return self._turns.turn((client, group))


class OpenChoices:
    """The choices of a model that a server has opened at its engines and that have not ended, by client.

    What the engines would refuse is refused here, before any of a body's choices is sent to them.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: how many all engines together take."""
        self._capacity = capacity
        self._opening: Counter[str] = Counter()
        self._streams: dict[TextStream, str] = {}

    def check(self, client: str, number: int) -> None:
        """Raises `TooManyRequests` if a client gets no `number` more choices."""
        self._streams = {stream: owner for stream, owner in self._streams.items() if stream.unfinished}
        counts = self._opening.copy()
        for stream, owner in self._streams.items():
            counts[owner] += len(stream.unfinished)
        if not has_room(counts, client, number, capacity=self._capacity):
            raise TooManyRequests(f"{counts.total()} choices are running or waiting; try again later")

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
        self._streams[stream] = client
