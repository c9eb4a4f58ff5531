"""How long a short request takes while a crowd attacks, against how long it takes in quiet, in one run."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from jobs.load.attacks import CROWD, HEADERS, attack_body
from jobs.load.stream_client import Target, failure_kind, record_stream

TURNS = 4
NUM_HEADERS, HEADER_BYTES = 100, 2**20  # of a request whose headers are the attack
HEADER_PIECE = 2**16  # bytes of a header that are sent at once


@dataclass(frozen=True, kw_only=True)
class Bystander:
    """Seconds of short requests, from their sending to their end, in quiet and beside the crowd's.

    num_ended     the crowd's requests that ended meanwhile
    crowd_errors  the kinds of failures among them: what is refused loads a server as well
    """

    quiet: tuple[float, ...]
    crowded: tuple[float, ...]
    num_ended: int
    crowd_errors: tuple[str, ...]

    def ratio(self, percentile: float) -> float:
        """The crowded percentile over the quiet one."""
        return float(np.percentile(self.crowded, percentile) / np.percentile(self.quiet, percentile))

    @property
    def slowest(self) -> float:
        """The slowest crowded request over the median of the quiet ones."""
        return float(max(self.crowded) / np.median(self.quiet))


async def measure_bystander(
    session: aiohttp.ClientSession,
    target: Target,
    *,
    crowd_session: aiohttp.ClientSession,
    prompt: str,
    attack: str,
    characters: int,
    requests: int,
    crowd: int,
    user: str = CROWD,
) -> Bystander:
    """Send `requests` short ones in quiet, then beside `crowd` senders of an attack, in `TURNS` turns. The crowd's
    session has its own key, and its bodies name `user`.

    Raises `RuntimeError` where a short request fails, or no request of the crowd ended while it was measured.
    """
    quiet: list[float] = []
    crowded: list[float] = []
    ended: list[str | None] = []
    for turn in range(TURNS):
        count = requests // TURNS + (turn < requests % TURNS)
        quiet += await _short(session, target, prompt, count)
        senders = [
            asyncio.create_task(
                _send_headers(target.url, ended)
                if attack == HEADERS
                else _send(crowd_session, target, attack, characters, f"{turn}x{i}", user, ended)
            )
            for i in range(crowd)
        ]
        try:
            await asyncio.sleep(0)
            crowded += await _short(session, target, prompt, count)
        finally:
            for sender in senders:
                sender.cancel()
            await asyncio.gather(*senders, return_exceptions=True)
    if not ended:
        raise RuntimeError(f"no request of the crowd ({attack}) was answered meanwhile; raise --requests")
    errors = sorted({error for error in ended if error is not None})
    return Bystander(quiet=tuple(quiet), crowded=tuple(crowded), num_ended=len(ended), crowd_errors=tuple(errors))


async def _short(session: aiohttp.ClientSession, target: Target, prompt: str, count: int) -> list[float]:
    seconds = []
    for number in range(count):
        record = await record_stream(session, target, f"{prompt} {number}", time.perf_counter())
        if record.error is not None:
            raise RuntimeError(f"a short request to {target.url} failed: {record.error}")
        seconds.append(record.seconds)
    return seconds


async def _send(
    session: aiohttp.ClientSession,
    target: Target,
    attack: str,
    characters: int,
    name: str,
    user: str,
    ended: list[str | None],
) -> None:
    """An attack's requests one after the other; adds each one's failure, or `None`, to `ended`."""
    number = 0
    while True:
        route, body = attack_body(attack, target.model, f"{name}x{number}", characters, user=user)
        try:
            async with session.post(f"{target.url}/v1/{route}", json=body) as response:
                await response.read()
                ended.append(None if response.status == 200 else f"HTTP {response.status}")
        except (aiohttp.ClientError, TimeoutError) as failure:
            ended.append(failure_kind(failure))
        number += 1


async def _send_headers(url: str, ended: list[str | None]) -> None:
    """Requests of `NUM_HEADERS` headers of `HEADER_BYTES`, one after the other, each to its answer or its end."""
    parts = urlsplit(url)
    while True:
        answer = b""
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            reading = asyncio.ensure_future(reader.read(4096))
            sending = asyncio.ensure_future(_write_headers(writer))
            try:  # it may answer before all is sent
                await asyncio.wait({sending, reading}, return_when=asyncio.FIRST_COMPLETED)
                answer = await reading
            finally:
                sending.cancel()
                reading.cancel()
                writer.transport.abort()
                await asyncio.gather(sending, reading, return_exceptions=True)
        status = answer[len("HTTP/1.1 ") :][:3].decode()
        ended.append(None if status == "200" else f"HTTP {status}" if status else "connection closed")


async def _write_headers(writer: asyncio.StreamWriter) -> None:
    piece = b"a" * HEADER_PIECE
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: crowd\r\nConnection: close\r\n")
    for number in range(NUM_HEADERS):
        writer.write(b"X-%d: " % number)
        for _ in range(HEADER_BYTES // HEADER_PIECE):
            writer.write(piece)
            await writer.drain()
        writer.write(b"\r\n")
    writer.write(b"\r\n")
