"""A budget for the thoughts of an answer: when it is spent, the mark that ends thoughts is inserted.

The answer is then two requests of the engine. The first is ended in the middle of its thoughts. The second continues
after the mark (`Request.committed`); the prefix cache keeps the keys of the first. So a budget works with each
decoding that can continue after committed tokens.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mbd_core.calls.thoughts import ThoughtReader
from mbd_core.decoding.blocks.request import Request, StepOutput
from mbd_core.serving.text.committed import CommittedText
from mbd_core.serving.tokens.joined import JoinedAnswer
from mbd_core.serving.tokens.stream import TokenSource, TokenStream, TooManyRequests

REST_OF_CHARACTER = 3  # an answer may exceed its budget by this number of tokens, so that no character is cut
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts to go on at a full engine, doubled each time


class ThoughtWatch:
    """Follows one answer, token by token, through its thoughts."""

    def __init__(self, text: CommittedText, reader: ThoughtReader) -> None:
        self._text, self._reader = text, reader
        self.num_tokens = 0

    def push(self, token: int) -> None:
        self._reader.push(self._text.push(token), ends=False)
        self.num_tokens += 1

    def is_spent(self, budget: int) -> bool:
        """Whether the answer is still within its thoughts after `budget` tokens."""
        spent = self.num_tokens - budget
        may_end = not self._text.in_character or spent >= REST_OF_CHARACTER
        return self._reader.in_thought and spent >= 0 and may_end


@dataclass(frozen=True, kw_only=True)
class ThoughtBudget:
    """The first `num_tokens` tokens of an answer may be thoughts.

    end    the tokens of the mark that ends thoughts
    watch  makes the watch of an answer
    """

    num_tokens: int
    end: tuple[int, ...]
    watch: Callable[[], ThoughtWatch]


class BudgetedSource:
    """A source whose answers keep to a budget for their thoughts."""

    def __init__(self, source: TokenSource, budget: ThoughtBudget) -> None:
        self._source, self._budget = source, budget

    async def open(self, request: Request, *, key: str = "") -> TokenStream:
        """The stream of a request, with the errors of the source's streams. Raises the source's refusals."""
        most = self._budget.num_tokens + REST_OF_CHARACTER + len(self._budget.end)
        if most >= request.max_tokens:  # `max_tokens` ends the answer first
            return await self._source.open(request, key=key)
        answer = _BudgetedAnswer(request, await self._source.open(request, key=key), self._budget)
        return TokenStream(answer.steps(partial(self._reopen, key)), answer.close)

    async def _reopen(self, key: str, request: Request) -> TokenStream:
        """The stream of an answer's rest. A full engine takes the rest later, because the answer was accepted."""
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._source.open(request, key=key)
            except TooManyRequests:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)


class _BudgetedAnswer:
    """The steps of an answer that may think."""

    def __init__(self, request: Request, stream: TokenStream, budget: ThoughtBudget) -> None:
        self._stream, self._budget, self._watch = stream, budget, budget.watch()
        self._answer = JoinedAnswer(request)
        for token in request.committed:
            self._watch.push(token)

    async def steps(self, reopen: Callable[[Request], Awaitable[TokenStream]]) -> AsyncIterator[StepOutput]:
        while not self._is_spent:
            step = await anext(self._stream, None)
            if step is None:
                return
            number = self._push(step.piece.tokens)
            dropped = len(step.piece) - number
            if dropped and (step.output is None or step.output.finish_reason != "abort"):
                counts = replace(step.counts, num_tokens=step.counts.num_tokens - dropped)
                step = replace(step, piece=step.piece[:number], output=None, counts=counts, frame=None)
            yield self._answer.add(step)
            if step.output is not None:
                return
        self._stream.close()
        yield self._answer.put_in(self._rest_of_end())
        rest = self._answer.next_request()
        # Another id: a step of the first request may still be on its way.
        self._stream = await reopen(replace(rest, request_id=f"{rest.request_id}t"))
        async for step in self._stream:
            yield self._answer.add(step)

    def close(self) -> None:
        self._stream.close()

    @property
    def _is_spent(self) -> bool:
        return self._watch.is_spent(self._budget.num_tokens)

    def _rest_of_end(self) -> tuple[int, ...]:
        """The tokens of the end mark that are missing at the answer's end."""
        end = self._budget.end
        tokens = self._answer.request.committed + self._answer.piece.tokens
        begun = next((n for n in range(len(end) - 1, 0, -1) if tokens[-n:] == end[:n]), 0)
        return end[begun:]

    def _push(self, tokens: Sequence[int]) -> int:
        """Follow the tokens until the budget is spent. Returns the number of followed tokens."""
        for number, token in enumerate(tokens):
            if self._is_spent:
                return number
            self._watch.push(token)
        return len(tokens)
