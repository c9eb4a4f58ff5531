"""Conversations over replicas that are killed and added: the share of prompt tokens found in caches, by router.

The router has the served policy (`PrefixAffinity`, with the hashes of `leading_pages`) and gets the same input as from
`actors/serving/routing.py`: the open requests at each replica, the lost replicas, and the sent prompts. A replica is a
page pool of the engine and a time for each request; no model runs. The other router knows no prefixes: it takes the
less loaded of two random replicas, as Serve does.
"""

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.memory.pages import PagePool
from mbd_core.serving.tokens.prefix_affinity import PrefixAffinity, leading_pages

RouterName = Literal["prefix", "two choices"]

COLUMNS = {
    "router": "router",
    "events": "replicas",
    "requests": "turns",
    "hit_rate": "prompt tokens found|.1%",
    "possible": "of what a replica that never ends would find|.1%",
    "stored": "tokens stored|,.0f",
    "median_wait": "median TTFT (s)|.2f",
    "p99_wait": "p99 TTFT (s)|.2f",
    "imbalance": "most / mean load|.2f",
}


@dataclass(frozen=True, kw_only=True)
class ConversationTraffic:
    """Conversations that begin at random times; each turn adds a question and an answer to all before.

    think  seconds between an answer and the next question, in the mean
    rate   conversations a second
    """

    conversations: int = 200
    turns: int = 10
    turn_tokens: int = 3000
    system_tokens: int = 1024
    systems: int = 4
    think: float = 20.0
    rate: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The replicas at the beginning, and their changes.

    events          (second, "kill" or "add")
    cache_tokens    tokens that a replica's pages hold
    token_seconds   seconds to store a token
    answer_seconds  seconds of an answer
    balance         requests under way that a preferred replica may have more than another
    """

    replicas: int = 4
    events: tuple[tuple[float, Literal["kill", "add"]], ...] = ()
    cache_tokens: int = 1_000_000
    page_size: int = 32
    rows: int = 16
    token_seconds: float = 1 / 20_000
    answer_seconds: float = 2.0
    balance: int = 8


@dataclass
class StubReplica:
    """A page pool, and when it is free to store the next prompt."""

    pool: PagePool
    free_at: float = 0.0
    under_way: int = 0
    served: int = 0

    def take(self, chain: Sequence[bytes]) -> int:
        """Find the beginning of `chain`, and publish its rest. Returns the number of found pages."""
        found = self.pool.lookup(chain)
        self.pool.share(found)
        pages = self.pool.alloc(len(chain) - len(found))
        if pages is None:  # the prompt exceeds the pool: the rest of it is not kept
            self.pool.release(found, chain[: len(found)])
            return len(found)
        self.pool.release([*found, *pages], chain)
        return len(found)


@dataclass
class Simulation:
    """One run of the traffic over the fleet."""

    traffic: ConversationTraffic
    fleet: Fleet
    router: RouterName
    seed: int = 0
    replicas: dict[str, StubReplica] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    stored_tokens: int = 0

    def run(self) -> dict[str, Any]:
        rng = random.Random(self.seed)
        self._affinity, self._routing = PrefixAffinity(balance=self.fleet.balance), random.Random(self.seed + 1)
        self._number = 0
        for _ in range(self.fleet.replicas):
            self._add()
        events: list[tuple[float, int, Callable[[float], None]]] = []
        self._events, self._order = events, 0
        for at, kind in self.fleet.events:
            self._at(at, self._kill if kind == "kill" else lambda now: self._add())
        systems = [
            tuple(rng.choices(range(30_000), k=self.traffic.system_tokens)) for _ in range(self.traffic.systems)
        ]
        start = 0.0
        for _ in range(self.traffic.conversations):
            start += rng.expovariate(self.traffic.rate)
            text = rng.choice(systems)
            self._at(start, lambda now, text=text: self._turn(now, text, 1, 0, rng))  # type: ignore[misc]
        while events:
            now, _, happen = heapq.heappop(events)
            happen(now)
        waits = sorted(self.waits)
        served = [replica.served for replica in self.replicas.values()]
        return {
            "router": self.router,
            "events": ", ".join(f"{kind} at {at:g} s" for at, kind in self.fleet.events) or "steady",
            "requests": len(waits),
            "hit_rate": self.hit_tokens / self.prompt_tokens,
            "possible": self.hit_tokens / self.stored_tokens,
            "stored": self.prompt_tokens - self.hit_tokens,
            "median_wait": statistics.median(waits),
            "p99_wait": waits[int(0.99 * len(waits))],
            "imbalance": max(served) / statistics.fmean(served),
        }

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, happen))

    def _add(self) -> None:
        self._number += 1
        self.replicas[f"replica {self._number}"] = StubReplica(
            PagePool(self.fleet.cache_tokens // self.fleet.page_size + 1)
        )

    def _kill(self, now: float) -> None:
        """The oldest replica is gone, and its pages; Serve tells the routers."""
        del self.replicas[next(iter(self.replicas))]
        self._affinity.keep(set(self.replicas))

    def _turn(self, now: float, text: tuple[int, ...], number: int, known: int, rng: random.Random) -> None:
        """A question comes; `known` tokens of the conversation were stored somewhere before."""
        prompt = (*text, *rng.choices(range(30_000), k=self.traffic.turn_tokens // 2))
        pages = self._pages(prompt)
        loads = {name: replica.under_way for name, replica in self.replicas.items()}
        name = self._choose(pages, loads)
        replica = self.replicas[name]
        hits = replica.take(pages) * self.fleet.page_size
        self.prompt_tokens += len(prompt)
        self.hit_tokens += hits
        self.stored_tokens += max(known // self.fleet.page_size * self.fleet.page_size, hits)
        begin = max(now, replica.free_at)
        replica.free_at = begin + (len(prompt) - hits) * self.fleet.token_seconds
        self.waits.append(replica.free_at - now)
        replica.under_way += 1
        replica.served += 1
        answer = (*prompt, *rng.choices(range(30_000), k=self.traffic.turn_tokens // 2))
        self._at(replica.free_at + self.fleet.answer_seconds, lambda end: self._ended(end, name, answer, number, rng))

    def _ended(self, now: float, name: str, text: tuple[int, ...], number: int, rng: random.Random) -> None:
        replica = self.replicas.get(name)
        if replica is not None:
            replica.under_way -= 1
            replica.take(self._pages(text))  # the answer's blocks are stored as well
        if number < self.traffic.turns:
            think = rng.expovariate(1 / self.traffic.think)
            self._at(now + think, lambda later: self._turn(later, text, number + 1, len(text), rng))

    def _choose(self, pages: list[bytes], loads: dict[str, int]) -> str:
        if self.router == "prefix":
            name = self._affinity.choose(pages, loads)
            self._affinity.note(pages, name)
            return name
        two = self._routing.sample(sorted(loads), k=min(2, len(loads)))
        return min(two, key=lambda replica: loads[replica])

    def _pages(self, tokens: tuple[int, ...]) -> list[bytes]:
        request = Request(request_id="turn", prompt=tokens, max_tokens=1, decoding=DecodingConfig(block_size=32))
        return leading_pages(request, page_size=self.fleet.page_size)


def affinity_rows(
    traffic: ConversationTraffic, fleet: Fleet, *, routers: Sequence[RouterName] = ("prefix", "two choices")
) -> list[dict[str, Any]]:
    """The same traffic over a steady fleet, and over a fleet with `fleet`'s events, by each router."""
    steady = Fleet(**{**vars(fleet), "events": ()})
    fleets = [steady] if not fleet.events else [steady, fleet]
    return [Simulation(traffic, of, router).run() for of in fleets for router in routers]
