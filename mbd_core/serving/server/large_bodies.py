"""Large bodies are parsed one at a time, with pauses for other clients' requests."""

import asyncio
from collections import Counter
from typing import TypeVar

from mbd_core.serving.api.messages import CountTokensRequest, MessagesRequest
from mbd_core.serving.api.parsing import parse
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest
from mbd_core.serving.api.responses import ResponsesRequest
from mbd_core.serving.tokens.fair_queue import FairTurns, has_room
from mbd_core.serving.tokens.stream import TooManyRequests

K = TypeVar("K", CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest, CountTokensRequest)

LARGE_BODY = 2**17  # bytes; parsing a larger body blocks the event loop for many milliseconds
MOST_LARGE = 16  # large bodies that may wait to be parsed
REST = 5.0  # pause after a large body, as a multiple of its parsing time


class LargeBodies:
    """Parses bodies on the event loop."""

    def __init__(self) -> None:
        self._turns = FairTurns(1, seconds=60.0)
        self._waiting: Counter[str] = Counter()
        self._next_parse = 0.0  # earliest time of the next parse, on the loop's clock

    async def parse(self, kind: type[K], body: bytes, *, client: str) -> K:
        """The request in a body. Raises the errors of `parse`, and `TooManyRequests` if many large bodies wait."""
        if len(body) <= LARGE_BODY:
            return parse(kind, body)
        if not has_room(self._waiting, client, 1, capacity=MOST_LARGE):
            raise TooManyRequests(f"{self._waiting.total()} large bodies wait to be read; try again later")
        self._waiting[client] += 1
        try:
            async with self._turns.turn((client,)):
                clock = asyncio.get_running_loop().time
                await asyncio.sleep(max(0.0, self._next_parse - clock()))
                start = clock()
                try:
                    return parse(kind, body)
                finally:
                    self._next_parse = clock() + REST * (clock() - start)
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]
