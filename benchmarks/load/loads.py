"""Loads: a fixed number of requests at once, or Poisson arrivals at a rate, and the records of their requests.

The generator is ours for two reasons. The same load, with the same arrivals and records, must go to an endpoint and to
an engine in this process. And an event of a block diffusion's stream brings several tokens, which other generators
count as one.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mbd_core.decoding.blocks.request import Request
    from mbd_core.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Tokens that came together: an event of a stream, or a step of an engine; `at` is a time in seconds."""

    at: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds of one clock, and latencies count from `due`.

    due       when the load asked for it; a late generator sends it later
    arrivals  its tokens as they came
    ended     when its end came: the last event, a whole answer, or the error
    error     the kind of its failure; `None` for a request that ended as promised
    """

    due: float
    arrivals: tuple[Arrival, ...]
    ended: float
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(a.num_tokens for a in self.arrivals)

    @property
    def seconds(self) -> float:
        """From the time it was due to its end."""
        return self.ended - self.due

    @property
    def first_token_seconds(self) -> float | None:
        """TTFT: to the first arrival, which in block diffusion may hold a whole block."""
        return self.arrivals[0].at - self.due if self.arrivals else None

    @property
    def token_seconds(self) -> float | None:
        """TPOT: the time from the first to the last arrival, over the tokens but the first; `None` below two
        tokens."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals[-1].at - self.arrivals[0].at) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """The times between consecutive arrivals."""
        return [b.at - a.at for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def inter_token_seconds(self) -> list[float]:
        """ITL of every token but the first. Tokens of one arrival came at the same time, so only one of them
        has a time above 0.

        Their mean is `token_seconds`.
        """
        if not self.arrivals:
            return []
        latencies = [0.0] * (self.arrivals[0].num_tokens - 1)
        for gap, arrival in zip(self.gaps, self.arrivals[1:], strict=True):
            latencies += [gap] + [0.0] * (arrival.num_tokens - 1)
        return latencies


def proportional_shares(total: int, weights: Sequence[int]) -> list[int]:
    """`total` tokens divided among events in proportion to `weights`; each event gets at least 1 while there are
    enough.

    For streams that report the sum of their tokens, and not the number of each event.
    """
    if not weights:
        return []
    minimum = min(1, total // len(weights))
    remainder, weight = total - minimum * len(weights), sum(weights) or len(weights)
    exact = [remainder * (w if sum(weights) else 1) / weight for w in weights]
    shares = [minimum + int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


Send = Callable[[int, float], Awaitable[RequestRecord]]
"""Send the i-th request, which was due at this time of `time.perf_counter`, and record it."""


@dataclass(frozen=True)
class Concurrency:
    """A closed loop: `size` requests are open until none is left to send; when one ends, the next is sent."""

    size: int

    def __str__(self) -> str:
        return f"{self.size} at once"


@dataclass(frozen=True)
class Poisson:
    """An open loop: requests arrive at `rate` a second, at times that do not depend on the answers."""

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"a rate of {self.rate} requests a second sends no load; give a finite number above 0")

    def __str__(self) -> str:
        return f"{self.rate:g} a second"

    def times(self, count: int) -> list[float]:
        """The arrival times of `count` requests; the gaps between them are exponential."""
        rng, times, now = random.Random(self.seed), [], 0.0
        for _ in range(count):
            now += rng.expovariate(self.rate)
            times.append(now)
        return times


Load = Concurrency | Poisson


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """All requests of a load, in the order of sending; `seconds` is from the beginning to the last request's end."""

    records: tuple[RequestRecord, ...]
    seconds: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord], start: float) -> LoadRun:
        return cls(records=tuple(records), seconds=max(record.ended for record in records) - start)


async def send_load(send: Send, load: Load, count: int) -> LoadRun:
    """Send `count` requests through a coroutine. A request's failure belongs into its record; an exception of `send`
    ends the load and is raised.
    """
    start = time.perf_counter()
    try:
        if isinstance(load, Concurrency):
            records = await _send_at_once(send, load.size, count)
        else:
            records = await _send_at_times(send, [start + offset for offset in load.times(count)])
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return LoadRun.of(records, start)


async def _send_at_once(send: Send, size: int, count: int) -> list[RequestRecord]:
    records: dict[int, RequestRecord] = {}
    numbers = iter(range(count))

    async def send_one_after_another() -> None:
        for number in numbers:
            records[number] = await send(number, time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(min(size, count)):
            group.create_task(send_one_after_another())
    return [records[number] for number in range(count)]


async def _send_at_times(send: Send, times: Sequence[float]) -> list[RequestRecord]:
    records: dict[int, RequestRecord] = {}

    async def send_one(number: int, due: float) -> None:
        records[number] = await send(number, due)

    async with asyncio.TaskGroup() as group:
        for number, due in enumerate(times):
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(send_one(number, due))
    return [records[number] for number in range(len(times))]


def load_engine_alone(engine: Engine, requests: Sequence[Request], load: Load) -> LoadRun:
    """The same load without a server: requests join the engine between its steps, in this thread."""
    start = time.perf_counter()
    dues = deque([start + offset for offset in load.times(len(requests))] if isinstance(load, Poisson) else [])
    size = load.size if isinstance(load, Concurrency) else len(requests)
    waiting = deque(requests)
    due_at: dict[str, float] = {}
    arrivals: dict[str, list[Arrival]] = {}
    end_of: dict[str, float] = {}
    while len(end_of) < len(requests):
        now = time.perf_counter()
        while waiting and len(due_at) - len(end_of) < size and (not dues or dues[0] <= now):
            request = waiting.popleft()
            due_at[request.request_id] = dues.popleft() if dues else now
            arrivals[request.request_id] = []
            engine.add(request)
        if not engine.has_work:
            time.sleep(max(0.0, dues[0] - now))
            continue
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.piece.tokens:
                arrivals[output.request_id].append(Arrival(at=now, num_tokens=len(output.piece.tokens)))
            if output.output is not None:
                end_of[output.request_id] = now
    ids = [r.request_id for r in requests]
    records = tuple(RequestRecord(due=due_at[i], arrivals=tuple(arrivals[i]), ended=end_of[i]) for i in ids)
    return LoadRun.of(records, start)
