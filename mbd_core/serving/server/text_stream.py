"""The stream of an API request: the steps of its choices as text, until they end or the client leaves."""

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
from mbd_core.serving.tokens.fair_queue import FairTurns, has_room
from mbd_core.serving.tokens.stream import TimeLimit, TokenSource, TokenStream, TooManyRequests

MAX_UNREAD_FRAMES = 64  # of one API request
NUM_OPENING, OPENING_SECONDS = 2, 0.25  # choices sent to the engines at once, and how long each holds its turn
AGAIN_SECONDS = 1.0  # between two attempts to open a choice that waits for room


@dataclass(frozen=True, kw_only=True)
class TextStep:
    """One step of one request: its new tokens and their text. The texts of all steps join to the whole answer.

    A request that met a stop string ends with finish_reason "stop"; its tokens, log-probabilities and counts then
    include the token that completed the stop string and none after it.

    output        the whole output, in the request's last step
    piece         the new tokens; `tail`, `frame` and `weights` as in `StepOutput`
    texts         the text that each new token made certain; `text` begins with them
    num_forwards  forwards of the request so far
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
        """The step in parts of one token each, which join to the step; the last part has the step's end."""
        last = len(self.piece) - 1
        if last < 1:
            yield self
            return
        rest = self.text[sum(map(len, self.texts)) :]
        for i, text in enumerate(self.texts):
            part = replace(self, text=text, piece=self.piece[i : i + 1], texts=(text,))
            yield replace(part, output=None, tail=Piece()) if i < last else replace(part, text=text + rest)


class TextStream:
    """The steps of one or several requests in order of arrival; iterate to the end, or `close()` it.

    Raises the errors of the requests' token streams, and `RequestTimedOut` at the end of `limit`. If the reader is
    slow, frames beyond `MAX_UNREAD_FRAMES` are dropped, and nothing else.
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
        """Submit the requests of client `key` as its `places` allow; `texts` holds the text state of each."""
        self.requests = tuple(requests)
        self.unfinished = {r.request_id for r in requests}
        self._source, self._key, self._limit, self._waits = source, key, limit or TimeLimit(None), waits
        self._queue: asyncio.Queue[TextStep | Exception] = asyncio.Queue()
        self._unread_frames = 0
        num_first = len(requests) if places is None else 1  # further requests may wait long for a place
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
        """Open a stream of requests that the source accepts, all or none.

        With `places`, only the first request must be accepted, and the others wait for room. With `waits`, the first
        request waits for room too. Raises the errors of `TokenSource.open`, and `RequestTimedOut`.
        """
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
        """Submits one request, and puts its steps into the queue, up to its end or a stop string. `opening` is the
        future that `open` waits for, if any."""
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
        """The request's stream. With `waits`, a refusal for lack of room is retried."""
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
    """Limits each client's choices at the engines to `most_each`; the client's other choices wait here.

    Clients take turns to send a choice to the engines, and so do the bodies of each client.
    """

    def __init__(self, most_each: int) -> None:
        self.most_each = most_each
        self._turns = FairTurns(NUM_OPENING, seconds=OPENING_SECONDS)
        self._places: dict[str, FairTurns] = {}
        self._choices: Counter[str] = Counter()  # choices with a place or waiting for one, per client

    @asynccontextmanager
    async def place(self, client: str, group: str) -> AsyncIterator[None]:
        """Wait for one of a client's places, and hold it during the block."""
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
        """Wait for the turn to send a choice to the engines, and hold it during the block."""
        return self._turns.turn((client, group))


class OpenChoices:
    """A model's open choices at the engines, by client.

    Choices that the engines would refuse are refused here, before any choice of a body is sent to them.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: the choices that all engines take together."""
        self._capacity = capacity
        self._opening: Counter[str] = Counter()
        self._streams: dict[TextStream, str] = {}

    def check(self, client: str, number: int) -> None:
        """Raises `TooManyRequests` if there is no room for `number` more choices of the client."""
        self._streams = {stream: owner for stream, owner in self._streams.items() if stream.unfinished}
        counts = self._opening.copy()
        for stream, owner in self._streams.items():
            counts[owner] += len(stream.unfinished)
        if not has_room(counts, client, number, capacity=self._capacity):
            raise TooManyRequests(f"{counts.total()} choices are running or waiting; try again later")

    @contextmanager
    def opening(self, client: str, number: int) -> Iterator[None]:
        """Count `number` choices while the block opens them. Raises the error of `check`."""
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
