"""Loads: so many requests at once, or Poisson arrivals at a rate; given to a coroutine, or to an engine by itself."""

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.load.load_records import Arrival, RequestRecord
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.engine import Engine

Send = Callable[[int, float], Awaitable[RequestRecord]]
"""Send the i-th request, which was due at this time of `time.perf_counter`, and record it."""


@dataclass(frozen=True)
class Concurrency:
    """A closed loop: `size` requests are open until none is left to send; each that ends is followed by the next."""

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
            raise ValueError(f"a rate of {self.rate} requests a second is none; give a number above 0")

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


async def send_load(send: Send, load: Load, count: int) -> LoadRun:
    """Send `count` requests through a coroutine. A request's failure belongs into its record; what `send` raises ends
    the load and is raised.
    """
    started = time.perf_counter()
    try:
        if isinstance(load, Concurrency):
            records = await _send_at_once(send, load.size, count)
        else:
            records = await _send_at_times(send, [started + at for at in load.times(count)])
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return LoadRun(records=tuple(records), seconds=_last_end(records) - started)


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
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, due in enumerate(times):
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(group.create_task(_recorded(send, number, due)))
    return [task.result() for task in tasks]


async def _recorded(send: Send, number: int, due: float) -> RequestRecord:
    return await send(number, due)


def load_engine_alone(engine: Engine, requests: Sequence[Request], load: Load) -> LoadRun:
    """The same load without a server: requests join the engine between its steps, in this thread."""
    started = time.perf_counter()
    dues = deque([started + at for at in load.times(len(requests))] if isinstance(load, Poisson) else [])
    size = load.size if isinstance(load, Concurrency) else len(requests)
    waiting = deque(requests)
    due_at: dict[str, float] = {}
    arrivals: dict[str, list[Arrival]] = {}
    ended: dict[str, float] = {}
    while len(ended) < len(requests):
        now = time.perf_counter()
        while waiting and len(due_at) - len(ended) < size and (not dues or dues[0] <= now):
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
            if output.new_tokens:
                arrivals[output.request_id].append(Arrival(at=now, num_tokens=len(output.new_tokens)))
            if output.output is not None:
                ended[output.request_id] = now
    ids = [r.request_id for r in requests]
    records = tuple(RequestRecord(due=due_at[i], arrivals=tuple(arrivals[i]), ended=ended[i]) for i in ids)
    return LoadRun(records=records, seconds=_last_end(records) - started)


def _last_end(records: Sequence[RequestRecord]) -> float:
    return max(record.ended for record in records)
