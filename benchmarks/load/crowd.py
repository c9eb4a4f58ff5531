"""A crowd of senders in a process of its own, so that the bystander's clock does not wait for the crowd's work.

A real crowd is on other machines and takes no core of the server's. So the process runs at the lowest priority.
"""

import asyncio
import multiprocessing
import os
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from benchmarks.load.attacks import CROWD, HEADERS, attack_body
from benchmarks.load.stream_client import failure_kind, open_session

NUM_HEADERS, HEADER_BYTES = 100, 2**20  # a request of the attack `headers`: its headers, and the bytes of each
HEADER_PIECE = 2**16  # bytes that are sent at once
LOWEST_PRIORITY = 19
STOP_SECONDS = 30.0

Endings = list[str | None]
"""How each of the crowd's requests ended: the kind of its failure, or `None`."""


@dataclass(frozen=True, kw_only=True)
class Attackers:
    """`number` senders of an attack as one client; `characters` is the length of a long text, `user` the client's name
    in the bodies, `api_key` its key."""

    attack: str
    url: str
    model: str
    number: int
    characters: int
    seconds: float
    user: str = CROWD
    api_key: str | None = None

    async def send(self, turn: int, endings: Endings) -> None:
        """Let each sender send one request after another, until the call is cancelled."""
        async with open_session(seconds=self.seconds, api_key=self.api_key) as session:
            senders: list[Awaitable[None]] = [
                _send_headers(self.url, endings)
                if self.attack == HEADERS
                else self._send(session, f"{turn}x{number}", endings)
                for number in range(self.number)
            ]
            await asyncio.gather(*senders)

    async def _send(self, session: aiohttp.ClientSession, name: str, endings: Endings) -> None:
        number = 0
        while True:
            prompt = f"{name}x{number}"
            route, body = attack_body(self.attack, self.model, prompt, self.characters, user=self.user)
            try:
                async with session.post(f"{self.url}/v1/{route}", json=body) as response:
                    await response.read()
                    endings.append(None if response.status == 200 else f"HTTP {response.status}")
            except (aiohttp.ClientError, TimeoutError) as failure:
                endings.append(failure_kind(failure))
            number += 1


class CrowdProcess:
    """A process that sends as `Attackers` between `begin` and `stop`; a context manager that ends it."""

    def __init__(self, attackers: Attackers) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, child_end = context.Pipe()
        self._process = context.Process(target=_obey, args=(attackers, child_end), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    async def begin(self, turn: int) -> None:
        """Start sending. The requests of a turn differ from those of all other turns."""
        await self._order(turn)

    async def stop(self) -> Endings:
        """Stop sending. Returns the ends of the finished requests."""
        return await self._order(None)

    async def _order(self, order: int | None) -> Endings:
        self._orders.send(order)
        if not await asyncio.to_thread(self._orders.poll, STOP_SECONDS):
            raise RuntimeError(f"the crowd's process did not answer within {STOP_SECONDS:g} s")
        try:
            answer: Endings = self._orders.recv()
        except EOFError:
            raise RuntimeError("the crowd's process ended; its error is above") from None
        return answer


def _obey(attackers: Attackers, orders: Connection) -> None:
    """The crowd's process: a number from the pipe begins a turn, `None` ends it."""
    os.nice(LOWEST_PRIORITY - os.nice(0))

    async def obey() -> None:
        while True:
            turn, endings = await asyncio.to_thread(orders.recv), Endings()
            task = asyncio.ensure_future(attackers.send(turn, endings))
            orders.send([])
            await asyncio.to_thread(orders.recv)
            task.cancel()
            await asyncio.wait([task])
            orders.send(endings)

    with suppress(EOFError, KeyboardInterrupt):
        asyncio.run(obey())


async def _send_headers(url: str, endings: Endings) -> None:
    """Send requests of huge headers, one after the other. Each ends with an answer or a closed connection."""
    parts = urlsplit(url)
    while True:
        answer = b""
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            reading = asyncio.ensure_future(reader.read(4096))
            task = asyncio.ensure_future(_write_headers(writer))
            try:  # the server may answer before all is sent
                await asyncio.wait({task, reading}, return_when=asyncio.FIRST_COMPLETED)
                answer = await reading
            finally:
                task.cancel()
                reading.cancel()
                writer.transport.abort()
                await asyncio.gather(task, reading, return_exceptions=True)
        status = answer[len("HTTP/1.1 ") :][:3].decode()
        endings.append(None if status == "200" else f"HTTP {status}" if status else "connection closed")


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
