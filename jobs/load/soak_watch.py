"""What goes on beside a soak's requests: replicas are killed, and every process's memory is sampled."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from jobs.load.own_endpoint import OwnEndpoint

ROLES = {  # role: how its processes' titles begin; the first that fits
    "gateway": "ray::ServeReplica:mbd:Gateway",
    "replica": "ray::ServeReplica:",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
}
POLL_SECONDS = 0.2
FLAT_GROWTH, FLAT_BYTES = 0.10, 32 * 2**20


@dataclass(frozen=True)
class Sample:
    """The resident memory of one process, so many seconds after the beginning."""

    seconds: float
    role: str
    pid: int
    num_bytes: int


@dataclass
class SoakWatch:
    """The kills and the memory samples of one soak; its seconds count from its making."""

    endpoint: OwnEndpoint
    session: aiohttp.ClientSession
    samples: list[Sample] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    async def replicas(self) -> list[dict[str, Any]]:
        """What /health says of each engine replica."""
        async with self.session.get(f"{self.endpoint.url}/health") as response:
            body = await response.json()
        return [replica for model in body["models"] for replica in model["replicas"]]

    async def wait_until(self, holds: Callable[[list[dict[str, Any]]], bool], *, limit: float) -> bool:
        """Ask for the replicas until `holds` does, for `limit` seconds at most; whether it did."""
        deadline = self.seconds + limit
        while self.seconds < deadline:
            with suppress(aiohttp.ClientError, TimeoutError):
                if holds(await self.replicas()):
                    return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def sample_memory(self, *, every: float, until: float) -> None:
        """Sample until so many seconds have passed."""
        while self.seconds < until:
            self.samples += [Sample(self.seconds, *found) for found in self._memory()]
            await asyncio.sleep(min(every, max(0.0, until - self.seconds)))

    async def kill_replicas(self, rng: random.Random, *, every: float, until: float, limit: float) -> None:
        """SIGKILL a replica every so often until so many seconds have passed.

        The next kill waits until there are as many ready replicas as before. Raises `RuntimeError` if there are not
        within `limit` seconds.
        """
        count = len(await self.replicas())
        while self.seconds + every < until:
            await asyncio.sleep(every)
            own = {p.pid: p for p in self.endpoint.process.children(recursive=True)}
            victim, at = own[rng.choice([s["pid"] for s in await self.replicas() if s["ready"]])], self.seconds
            victim.kill()

            def recovered(states: Sequence[dict[str, Any]], dead: int = victim.pid) -> bool:
                return sum(s["ready"] and s["pid"] != dead for s in states) == count

            if not await self.wait_until(recovered, limit=limit):
                raise RuntimeError(f"{limit:g} s after a replica was killed not all {count} were ready again")
            self.recoveries.append(self.seconds - at)

    def _memory(self) -> list[tuple[str, int, int]]:
        found = []
        for process in self.endpoint.process.children(recursive=True):
            with suppress(psutil.Error, IndexError):
                title = process.cmdline()[0]
                role = next((role for role, begin in ROLES.items() if title.startswith(begin)), None)
                if role is not None:
                    found.append((role, process.pid, process.memory_info().rss))
        return found


def memory_rows(samples: Sequence[Sample], seconds: float) -> list[dict[str, Any]]:
    """For each role the memory of one process, as the median over each quarter of the time, and whether it is flat.

    Flat: from the second quarter to the last it grew by less than 10 %, or by less than 32 MiB. The first quarter
    does not count, in which pages are touched for the first time.
    """
    rows = []
    for role in dict.fromkeys(sample.role for sample in samples):
        quarters: list[list[int]] = [[], [], [], []]
        for sample in samples:
            if sample.role == role:
                quarters[min(3, int(4 * sample.seconds / seconds))].append(sample.num_bytes)
        medians = [statistics.median(values) if values else None for values in quarters]
        early, late = medians[1], medians[3]
        flat = None if early is None or late is None else late - early < max(FLAT_GROWTH * early, FLAT_BYTES)
        rows.append(
            {
                "role": role,
                "processes": len({sample.pid for sample in samples if sample.role == role}),
                **{f"quarter_{n + 1}": None if m is None else m / 2**20 for n, m in enumerate(medians)},
                "flat": flat,
            }
        )
    return rows
