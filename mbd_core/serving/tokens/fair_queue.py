"""The order of waiting clients: they take turns, and so do the requests of each client."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from mbd_core.serving.tokens.stream import TooManyRequests

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue whose keys are paths: a client, one of its requests, and so on. At each level the branches take turns:
    after its turn a branch moves to the end, and an empty branch loses its place."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()  # items of the empty path
        self._branches: OrderedDict[str, FairQueue[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items) + sum(map(len, self._branches.values()))

    def push(self, key: Sequence[str], item: T) -> None:
        """Adds an item after the other items of its key."""
        if key:
            self._branches.setdefault(key[0], FairQueue()).push(key[1:], item)
        else:
            self._items.append(item)

    def pop(self) -> T:
        """The oldest item of the key whose turn it is. Raises `IndexError` if the queue is empty."""
        if self._items:
            return self._items.popleft()
        if not self._branches:
            raise IndexError("pop from an empty queue")
        name, branch = self._branches.popitem(last=False)
        item = branch.pop()
        if branch:
            self._branches[name] = branch
        return item

    def pop_of(self, may: Callable[[str], bool]) -> T | None:
        """`pop` among the items whose first name satisfies `may`; `None` if there is no such item.

        All other items keep their places.
        """
        name = next((name for name in self._branches if may(name)), None)
        if name is None:
            return None
        self._branches.move_to_end(name, last=False)
        return self.pop()

    def remove(self, key: Sequence[str], item: T) -> None:
        """Remove a waiting item from its place."""
        if not key:
            self._items.remove(item)
            return
        branch = self._branches[key[0]]
        branch.remove(key[1:], item)
        if not branch:
            del self._branches[key[0]]

    def clear(self) -> None:
        self._items.clear()
        self._branches.clear()


class FairTurns:
    """At most `number` coroutines have a turn at once, each for at most `seconds`; other coroutines wait in a
    `FairQueue`.

    After `seconds` a coroutine keeps running, but the next coroutine gets its turn, so that a coroutine that waits for
    something else delays no other coroutine. All methods belong to one event loop.
    """

    def __init__(self, number: int, *, seconds: float | None = None) -> None:
        self._free, self._seconds = number, seconds
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def turn(self, key: Sequence[str]) -> AsyncIterator[None]:
        """Wait for a turn, and hold it during the block."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(key)
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._pass_on()

        limit = None if self._seconds is None else asyncio.get_running_loop().call_later(self._seconds, end)
        try:
            yield
        finally:
            if limit is not None:
                limit.cancel()
            end()

    async def _wait(self, key: Sequence[str]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(key, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was given at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():  # the waiting coroutine was not cancelled
                turn.set_result(None)
                return
        self._free += 1


def has_room(counts: Mapping[str, int], client: str, number: int, *, capacity: int) -> bool:
    """Whether `client` may take `number` more places; `counts` holds the places taken by each client.

    If the places exceed `capacity`, a client still gets places up to an equal share, so that a client with all places
    locks nobody out. So the total may exceed `capacity`, by a factor that grows with the logarithm of the number of
    clients.
    """
    if sum(counts.values()) + number <= capacity:
        return True
    num_others = sum(count > 0 for other, count in counts.items() if other != client)
    return counts.get(client, 0) + number <= capacity // (num_others + 1)


class Refusals:
    """Delays repeated refusals, so that a client in a retry loop does not occupy the event loop. All methods belong to
    one event loop."""

    def __init__(self, *, seconds: float, most: int) -> None:
        """A refusal within `seconds` of the client's last refusal is delayed by `seconds`; at most `most` are delayed
        at once."""
        self._seconds, self._most = seconds, most
        self._last: OrderedDict[str, float] = (
            OrderedDict()
        )  # time of each client's last refusal, the latest at the end
        self._slowed = 0

    @asynccontextmanager
    async def slow_refusals(self, client: str) -> AsyncIterator[None]:
        """Delays a `TooManyRequests` of the block if the client was refused a moment ago."""
        try:
            yield
        except TooManyRequests:
            now = asyncio.get_running_loop().time()
            while self._last and next(iter(self._last.values())) < now - self._seconds:
                self._last.popitem(last=False)
            is_repetition = client in self._last and self._slowed < self._most
            self._slowed += is_repetition
            try:
                await asyncio.sleep(self._seconds if is_repetition else 0)
            finally:
                self._slowed -= is_repetition
            self._last[client] = asyncio.get_running_loop().time()
            self._last.move_to_end(client)
            raise
