"""The stream of an answer's text that `LLM.stream` returns."""

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Self

from jobs.api.answers import Answer
from jobs.api.keywords import json_body
from jobs.api.session import LOOK_SECONDS, Session, TracedReply, plain_error
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.requests import ChatRequest
from mbd_core.serving.server.text_stream import TextStep


class AnswerStream:
    """Iterates over the pieces of one answer's text as they are committed; made by `LLM.stream`.

    answer  the whole answer, `None` until the last piece is read
    """

    def __init__(
        self, session: Session, body: dict[str, Any], *, trace: bool, answer_of: Callable[[TracedReply], Answer]
    ) -> None:
        self.answer: Answer | None = None
        self._answer_of = answer_of
        self._pieces: SimpleQueue[str | TracedReply | BaseException] = SimpleQueue()
        body = {**body, "stream": True} | ({"frames": True} if trace else {})
        work = _feed(self._pieces, session, json_body(body), trace=trace)
        self._cancel = weakref.finalize(self, session.start(work))
        first = self._next()  # so that a refusal is raised here, not at the first `next`
        self._first = first if isinstance(first, str | TracedReply) else self._refuse(first)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while self.answer is None and self._cancel.alive:
            item, self._first = self._first or self._next(), ""
            if isinstance(item, TracedReply):
                self.answer = self._answer_of(item)
                self._cancel()
            elif isinstance(item, BaseException):
                self._refuse(item)
            elif item:
                return item
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort the request; no piece follows. Does nothing after the last piece."""
        self._cancel()

    def _next(self) -> str | TracedReply | BaseException:
        while True:
            with suppress(Empty):
                return self._pieces.get(timeout=LOOK_SECONDS)

    def _refuse(self, error: BaseException) -> NoReturn:
        self._cancel()
        raise error


async def _feed(
    pieces: "SimpleQueue[str | TracedReply | BaseException]",
    session: Session,
    body: bytes,
    *,
    trace: bool,
) -> None:
    """Put the texts of a request's steps into a queue, then its reply or the exception that ended it."""

    def put(step: TextStep, content: str) -> None:
        pieces.put(content)

    try:
        pieces.put(await session.ask(ChatRequest, body, trace=trace, on_step=put))
    except ApiError as error:
        pieces.put(plain_error(error))
    except asyncio.CancelledError:
        pieces.put(RuntimeError("this LLM was closed meanwhile"))
        raise
    except Exception as error:  # any exception must reach the reader, which would wait for ever
        pieces.put(error)
