"""How long a short request takes while others send long prompts, against how long it takes in quiet, in one run."""

import asyncio
import time
from dataclasses import dataclass, replace

import aiohttp
import numpy as np

from jobs.load.stream_client import Target, record_stream
from mbd_core.bench.load_records import RequestRecord

TURNS = 4


@dataclass(frozen=True, kw_only=True)
class Bystander:
    """Seconds of short requests, from their sending to their end, in quiet and beside long prompts.

    num_long     long requests that ended meanwhile
    long_errors  the kinds of failures among them: a prompt that is refused loads a server as well
    """

    quiet: tuple[float, ...]
    crowded: tuple[float, ...]
    num_long: int
    long_errors: tuple[str, ...]

    def ratio(self, percentile: float) -> float:
        """The crowded percentile over the quiet one."""
        return float(np.percentile(self.crowded, percentile) / np.percentile(self.quiet, percentile))


async def measure_bystander(
    session: aiohttp.ClientSession, target: Target, *, prompt: str, long_prompt: str, requests: int, crowd: int
) -> Bystander:
    """Send `requests` short ones in quiet, then beside `crowd` senders of long prompts, in `TURNS` turns.

    Raises `RuntimeError` where a short request fails, or no long one ended while it was measured.
    """
    quiet: list[float] = []
    crowded: list[float] = []
    ended: list[RequestRecord] = []
    for turn in range(TURNS):
        count = requests // TURNS + (turn < requests % TURNS)
        quiet += await _short(session, target, prompt, count)
        long = replace(target, max_tokens=1)
        senders = [asyncio.create_task(_send(session, long, f"{long_prompt} {turn} {i}", ended)) for i in range(crowd)]
        try:
            await asyncio.sleep(0)
            crowded += await _short(session, target, prompt, count)
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)
    if not ended:
        raise RuntimeError("no long prompt was answered while short requests were measured; raise --requests")
    errors = sorted({record.error for record in ended if record.error is not None})
    return Bystander(quiet=tuple(quiet), crowded=tuple(crowded), num_long=len(ended), long_errors=tuple(errors))


async def _short(session: aiohttp.ClientSession, target: Target, prompt: str, count: int) -> list[float]:
    seconds = []
    for number in range(count):
        record = await record_stream(session, target, f"{prompt} {number}", time.perf_counter())
        if record.error is not None:
            raise RuntimeError(f"a short request to {target.url} failed: {record.error}")
        seconds.append(record.seconds)
    return seconds


async def _send(session: aiohttp.ClientSession, target: Target, prompt: str, ended: list[RequestRecord]) -> None:
    """Long prompts one after the other; each differs from the others, so that no cache holds it."""
    number = 0
    while True:
        ended.append(await record_stream(session, target, f"{number} {prompt}", time.perf_counter()))
        number += 1
