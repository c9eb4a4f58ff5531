"""Arrivals on engines that keep their own time: each request's replica, and its wait.

Only the engines move the clock. A step begins when the step before it has ended, with all requests that have arrived
by then. Its results count when its seconds are over. So a simulated engine and a real one, whose steps are timed, are
driven by the same loop.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.capacity.simulated_engine import SimulatedEngine
from benchmarks.capacity.traffic import Clients, Routing, TimedTurn, Traffic, arrivals
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request, StepOutput
from mbd_core.engine.engine import Engine
from mbd_core.evaluation.measures.statistics import percentile
from mbd_core.serving.tokens.prefix_affinity import PrefixAffinity, leading_pages


class TimedEngine(Protocol):
    """An engine and the seconds of its step."""

    @property
    def engine(self) -> Engine: ...

    def step(self) -> tuple[list[StepOutput], float]: ...


class Simulated:
    """A simulated engine: its step model gives the seconds of its steps."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine

    def step(self) -> tuple[list[StepOutput], float]:
        before = self.engine.seconds
        return self.engine.step(), self.engine.seconds - before


class Measured:
    """A real engine: its steps take the seconds of `clock`."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self.engine, self._clock = engine, clock
        self.seconds: list[float] = []

    def step(self) -> tuple[list[StepOutput], float]:
        start = self._clock()
        outputs = self.engine.step()
        self.seconds.append(self._clock() - start)
        return outputs, self.seconds[-1]


class ReplicaRouter:
    """The choice of a request's engine: the engine with most of its prompt stored (`PrefixAffinity`) or, by load, the
    less busy of two random engines, as Serve chooses."""

    def __init__(self, replicas: Sequence[TimedEngine], routing: Routing, *, rng: random.Random) -> None:
        engine = replicas[0].engine
        self._routing, self._rng, self._page_size = routing, rng, engine.page_size
        self._affinity = PrefixAffinity(balance=engine.config.max_rows // 2)
        self.loads = {str(number): 0 for number in range(len(replicas))}

    def choose(self, request: Request) -> int:
        """Choose a replica and count the request there. Returns the replica's number."""
        if len(self.loads) == 1:
            name = "0"
        elif self._routing == "prefix":
            pages = leading_pages(request, page_size=self._page_size)
            name = self._affinity.choose(pages, self.loads)
            self._affinity.note(pages, name)
        else:
            name = min(self._rng.sample(sorted(self.loads), 2), key=lambda replica: self.loads[replica])
        self.loads[name] += 1
        return int(name)


@dataclass
class Served:
    """All turns of a run, in the order of their ends; its seconds on the virtual clock; steps of all engines."""

    turns: list[TimedTurn] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    busy: float = 0.0

    def row(self, num_replicas: int, traffic: Traffic | None = None) -> dict[str, Any]:
        """The run as a row of a table; with its `traffic`, also the waits of short and of long sessions apart."""
        ttft, speed = [t.ttft for t in self.turns], [t.speed for t in self.turns]
        tokens, prompt = sum(t.tokens for t in self.turns), sum(len(t.request.prompt) for t in self.turns)
        row: dict[str, Any] = {"replicas": num_replicas, "requests": len(self.turns), "steps": self.steps}
        row["ttft_mean"] = sum(ttft) / len(ttft)
        for percent in (50, 90, 99):
            row[f"ttft_p{percent}"] = percentile(ttft, percent)
        for name, of_long in (("short", False), ("long", True)):
            if traffic is None or not traffic.long_every:
                break
            part = [t.ttft for t in self.turns if traffic.is_long(t.session.number) is of_long]
            row[f"{name}_mean"], row[f"{name}_p99"] = sum(part) / max(1, len(part)), percentile(part, 99)
        slow = percentile([-value for value in speed], 90)
        return row | {
            "speed_p50": percentile(speed, 50),
            "speed_p10": None if slow is None else -slow,
            "tps": tokens / self.seconds,
            "tokens": tokens,
            "forwards": sum(t.forwards for t in self.turns),
            "hits": sum(t.cached for t in self.turns) / prompt,
            "preemptions": sum(t.preemptions for t in self.turns),
            "busy": self.busy / (num_replicas * self.seconds),
            "seconds": self.seconds,
        }


COLUMNS = {
    "replicas": "replicas",
    "rate": "sessions/s|.4g",
    "requests": "requests",
    "ttft_mean": "TTFT mean (ms)|.1f",
    "ttft_p50": "p50 (ms)|.1f",
    "ttft_p90": "p90 (ms)|.1f",
    "ttft_p99": "p99 (ms)|.1f",
    "short_mean": "of short sessions, mean (ms)|.1f",
    "short_p99": "of short sessions, p99 (ms)|.1f",
    "long_mean": "of long sessions, mean (ms)|.1f",
    "speed_p50": "tok/s a request p50|.1f",
    "speed_p10": "slowest tenth|.1f",
    "tps": "tok/s|.0f",
    "hits": "prefix found|.1%",
    "busy": "busy|.0%",
    "preemptions": "preempted",
    "steps": "steps",
    "bound": "bound by",
}


def serve(
    replicas: Sequence[TimedEngine],
    traffic: Traffic,
    decoding: DecodingConfig,
    *,
    routing: Routing = "prefix",
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> Served:
    """Serve a traffic to its end; `tick` is called at every answer's end. Raises the admission's refusals."""
    rng, order = random.Random(seed), itertools.count()
    clients, router = Clients(traffic, decoding, seed=seed), ReplicaRouter(replicas, routing, rng=rng)
    number = traffic.sessions or 20 * len(replicas)
    events: list[
        tuple[float, int, TimedTurn | int, list[StepOutput]]
    ] = []  # arrivals of turns and ends of replicas' steps
    due_times = enumerate(arrivals(traffic, number, rng=rng))
    open_turns: dict[str, TimedTurn] = {}
    idle, served = set(range(len(replicas))), Served()

    def come(turn: TimedTurn | None) -> None:
        if turn is not None:
            heapq.heappush(events, (turn.due, next(order), turn, []))

    def next_session() -> None:
        begin = next(due_times, None)
        come(None if begin is None else clients.begin(*begin))

    def run(replica: int, now: float) -> None:
        """Begin the replica's next step, if it has one."""
        if not replicas[replica].engine.has_work:
            idle.add(replica)
            return
        idle.discard(replica)
        outputs, seconds = replicas[replica].step()
        served.steps += 1
        served.busy += seconds
        heapq.heappush(events, (now + seconds, next(order), replica, outputs))

    next_session()
    while events:
        now, _, what, outputs = heapq.heappop(events)
        if isinstance(what, TimedTurn):
            open_turns[what.request.request_id] = what
            replica = router.choose(what.request)
            replicas[replica].engine.add(what.request)
            if what.session.turn == 1:
                next_session()
            if replica in idle:
                run(replica, now)
            continue
        for output in outputs:
            turn = open_turns[output.request_id]
            if output.piece.tokens and not turn.first_token:
                turn.first_token = now
            if output.output is None:
                continue
            counts = output.output.counts
            turn.end, turn.tokens, turn.cached = now, len(output.output.tokens), counts.num_cached_tokens
            turn.forwards, turn.preemptions = counts.num_forwards, counts.num_preemptions
            served.turns.append(open_turns.pop(output.request_id))
            router.loads[str(what)] -= 1
            come(clients.next(turn, output.output.tokens))
            tick()
        served.seconds = max(served.seconds, now)
        run(what, now)
    assert not open_turns, f"{len(open_turns)} requests were lost"
    return served
