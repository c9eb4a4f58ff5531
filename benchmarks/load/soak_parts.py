"""The parts of a soak: random requests, kills of replicas, and samples of the memory."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import psutil

from benchmarks.load.endpoints import OwnEndpoint
from benchmarks.load.stream_client import StreamError, Target, failure_kind, stream_chunks

SoakKind = Literal["stream", "whole answer", "hang-up", "bad request"]
End = Literal["whole", "error", "refused", "hung up", "lost", "wrong"]
"""How a request ended.

whole    complete, as requested
refused  refused before it was accepted: with 429 or 503, or a bad request with a 4xx
error    ended by another error in OpenAI's shape
hung up  ended by the client, on purpose
lost     ended without an error in OpenAI's shape: a cut connection, a stream without an end, no answer in time
wrong    another result than expected: another text, no end, or no refusal of a bad request
"""
WEIGHTS: dict[SoakKind, int] = {"stream": 50, "whole answer": 20, "hang-up": 15, "bad request": 15}
EXACT = {"buffer_size": 1}
"""With one block at a time an answer does not depend on the place where another replica took its stream over. With
several blocks it may."""
BAD_BODIES: tuple[bytes, ...] = (
    b"",
    b"{",
    b'{"model": "nobody", "messages": [{"role": "user", "content": "a"}]}',
    b'{"messages": []}',
    b'{"model": %(model)s, "messages": [{"role": "user", "content": "a"}], "temperature": 9}',
    b'{"model": %(model)s, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1000000}',
    b'{"model": %(model)s, "messages": [{"role": "user", "content": "a"}], "decoding": {"buffer_size": 4096}}',
    b'{"model": %(model)s, "messages": [{"role": "user", "content": "a"}], "no_such_field": 1}',
)


@dataclass(frozen=True)
class EndedRequest:
    """The end of one request; `detail` is the reason of a failure."""

    kind: SoakKind
    end: End
    detail: str = ""


class SoakClient:
    """Sends one request after another, each drawn from `rng`; compares each exact answer with the first exact answer
    to its prompt."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, prompts: Sequence[str], rng: random.Random
    ) -> None:
        self._session, self._target, self._prompts, self._rng = session, target, prompts, rng
        self._texts: dict[str, str] = {}

    async def send(self, kind: SoakKind | None = None) -> EndedRequest:
        """One request to its end. Failures of the endpoint are in the result, and not raised."""
        kind = kind or self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        try:
            if kind == "bad request":
                return await self._bad()
            prompt, exact = self._rng.choice(self._prompts), self._rng.random() < 0.5
            body = self._target.body(prompt, stream=kind != "whole answer")
            if exact:
                body["decoding"] = EXACT
            if kind == "hang-up":
                return await self._hang_up(body)
            text = await (self._stream(body) if kind == "stream" else self._complete(body))
        except EndedEarly as early:
            return EndedRequest(kind, early.end, early.detail)
        except StreamError as error:
            return EndedRequest(kind, *_stream_end(str(error)))
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return EndedRequest(kind, "lost", failure_kind(error))
        except (KeyError, IndexError, TypeError) as error:
            return EndedRequest(kind, "wrong", f"an answer without {error}")
        if exact and self._texts.setdefault(prompt, text) != text:
            return EndedRequest(kind, "wrong", "another text than before")
        return EndedRequest(kind, "whole")

    async def _stream(self, body: Mapping[str, Any]) -> str:
        text, ends = "", 0
        async for chunk, _ in stream_chunks(self._session, self._target, body):
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                ends += choice["finish_reason"] is not None
        if ends != 1:
            raise EndedEarly("wrong", f"{ends} finish reasons in a stream")
        return text

    async def _complete(self, body: Mapping[str, Any]) -> str:
        async with self._session.post(f"{self._target.url}/v1/{self._target.route}", json=body) as response:
            answer = _json(await response.read())
            if response.status != 200:
                raise _refusal(response.status, answer)
        if answer is None or answer["choices"][0]["finish_reason"] not in ("stop", "length"):
            raise EndedEarly("wrong", "an answer without an end")
        return str(answer["choices"][0]["message"]["content"])

    async def _hang_up(self, body: Mapping[str, Any]) -> EndedRequest:
        """Leave after some events, or before the first."""
        num_events = self._rng.randrange(4)
        chunks = stream_chunks(self._session, self._target, body)
        async for _ in chunks:
            if num_events == 0:
                break
            num_events -= 1
        await chunks.aclose()  # closes the connection, as its response was not read to the end
        return EndedRequest("hang-up", "hung up")

    async def _bad(self) -> EndedRequest:
        body = self._rng.choice(BAD_BODIES).replace(b"%(model)s", json.dumps(self._target.model).encode())
        async with self._session.post(f"{self._target.url}/v1/{self._target.route}", data=body) as response:
            answer = _json(await response.read())
        if 400 <= response.status < 500 and _is_error(answer):
            return EndedRequest("bad request", "refused")
        if response.status == 503 and _is_error(answer):
            return EndedRequest("bad request", "error", "HTTP 503")
        return EndedRequest(
            "bad request", "wrong", f"HTTP {response.status}" + ("" if _is_error(answer) else ", not JSON")
        )


class EndedEarly(Exception):
    """A request that did not end whole."""

    def __init__(self, end: End, detail: str) -> None:
        super().__init__(detail)
        self.end, self.detail = end, detail


def _refusal(status: int, answer: Any) -> EndedEarly:
    if not _is_error(answer):
        return EndedEarly("lost", f"HTTP {status}, not OpenAI's error")
    return EndedEarly("refused" if status in (429, 503) else "error", f"HTTP {status}")


def _stream_end(failure: str) -> tuple[End, str]:
    if failure == "error event":
        return "error", failure
    if failure in ("HTTP 429", "HTTP 503"):
        return "refused", failure
    return ("error" if failure.startswith("HTTP") else "lost"), failure


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _is_error(answer: Any) -> bool:
    return isinstance(answer, dict) and isinstance(answer.get("error"), dict) and "message" in answer["error"]


ROLES = {  # role: the beginning of its processes' titles; the first match counts
    "gateway": "ray::ServeReplica:mbd:Gateway",
    "replica": "ray::ServeReplica:",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
}
POLL_SECONDS = 0.2
FLAT_GROWTH, FLAT_BYTES = 0.10, 32 * 2**20


@dataclass(frozen=True)
class MemorySample:
    """The resident memory of one process, `seconds` after the soak's beginning."""

    seconds: float
    role: str
    pid: int
    num_bytes: int


@dataclass
class SoakWatch:
    """The kills and the memory samples of one soak; its seconds count from its creation."""

    endpoint: OwnEndpoint
    session: aiohttp.ClientSession
    samples: list[MemorySample] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    async def replicas(self) -> list[dict[str, Any]]:
        """The state of each engine replica in /health."""
        async with self.session.get(f"{self.endpoint.url}/health") as response:
            body = await response.json()
        return [replica for model in body["models"] for replica in model["replicas"]]

    async def wait_until(self, holds: Callable[[list[dict[str, Any]]], bool], *, limit: float) -> bool:
        """Poll the replicas' states until `holds` is true, at most `limit` seconds. Returns whether it became true."""
        deadline = self.seconds + limit
        while self.seconds < deadline:
            with suppress(aiohttp.ClientError, TimeoutError):
                if holds(await self.replicas()):
                    return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def sample_memory(self, *, every: float, until: float) -> None:
        """Sample the memory every `every` seconds, until `until` seconds after the beginning."""
        while self.seconds < until:
            self.samples += [MemorySample(self.seconds, *process) for process in self._memory()]
            await asyncio.sleep(min(every, max(0.0, until - self.seconds)))

    async def kill_replicas(self, rng: random.Random, *, every: float, until: float, limit: float) -> None:
        """SIGKILL a replica every `every` seconds, until `until` seconds after the beginning.

        The next kill waits for as many ready replicas as before. Raises `RuntimeError` if they are not ready within
        `limit` seconds.
        """
        count = len(await self.replicas())
        while self.seconds + every < until:
            await asyncio.sleep(every)
            children = {p.pid: p for p in self.endpoint.process.children(recursive=True)}
            victim, kill_time = (
                children[rng.choice([s["pid"] for s in await self.replicas() if s["ready"]])],
                self.seconds,
            )
            victim.kill()

            def is_complete(states: Sequence[dict[str, Any]], dead_pid: int = victim.pid) -> bool:
                return sum(s["ready"] and s["pid"] != dead_pid for s in states) == count

            if not await self.wait_until(is_complete, limit=limit):
                raise RuntimeError(f"{limit:g} s after a replica was killed not all {count} were ready again")
            self.recoveries.append(self.seconds - kill_time)

    def _memory(self) -> list[tuple[str, int, int]]:
        memory = []
        for process in self.endpoint.process.children(recursive=True):
            with suppress(psutil.Error, IndexError):
                title = process.cmdline()[0]
                role = next((role for role, begin in ROLES.items() if title.startswith(begin)), None)
                if role is not None:
                    memory.append((role, process.pid, process.memory_info().rss))
        return memory


def memory_rows(samples: Sequence[MemorySample], seconds: float) -> list[dict[str, Any]]:
    """For each role the memory of one process, as the median over each quarter of the time, and whether it is flat.

    Flat: from the second quarter to the last it grew by less than 10 %, or by less than 32 MiB. The first quarter does
    not count: pages are touched for the first time then.
    """
    rows = []
    for role in dict.fromkeys(sample.role for sample in samples):
        quarters: list[list[int]] = [[], [], [], []]
        for sample in samples:
            if sample.role == role:
                quarters[min(3, int(4 * sample.seconds / seconds))].append(sample.num_bytes)
        medians = [statistics.median(values) if values else None for values in quarters]
        early_bytes, late_bytes = medians[1], medians[3]
        is_flat = (
            None
            if early_bytes is None or late_bytes is None
            else late_bytes - early_bytes < max(FLAT_GROWTH * early_bytes, FLAT_BYTES)
        )
        rows.append(
            {
                "role": role,
                "processes": len({sample.pid for sample in samples if sample.role == role}),
                **{f"quarter_{n + 1}": None if m is None else m / 2**20 for n, m in enumerate(medians)},
                "flat": is_flat,
            }
        )
    return rows
