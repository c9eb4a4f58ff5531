"""A bystander's latency while a crowd attacks, as a ratio to its latency in quiet in the same run; the servers'
memory."""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import psutil

from benchmarks.load.attacks import ATTACKS, CROWD, HEADERS, LONG
from benchmarks.load.crowd import Attackers, CrowdProcess, Endings
from benchmarks.load.soak_parts import ROLES
from benchmarks.load.stream_client import RequestSeconds, Target, open_session, record_stream, served_models
from mbd_core.command_line import command, refuse_given
from mbd_core.fields import DATA, LOAD, MODEL, Flag, Ge


def served_memory(url: str) -> dict[str, int]:
    """Resident bytes of the processes behind an endpoint of this machine, by role and pid.

    The processes belong to the node whose proxy listens on the port of `url`. Raises `ValueError` if no process here
    listens on it.
    """
    port = urlsplit(url).port
    proxy = next((process for process in psutil.process_iter() if _listens(process, port)), None)
    if proxy is None or (node := proxy.parent()) is None:
        raise ValueError(
            f"no proxy that listens on the port of {url} is seen on this machine; start the measurement on the "
            "server's machine, as its user"
        )
    memory = {}
    for process in node.children():
        with suppress(psutil.Error, IndexError):
            title = process.cmdline()[0]
            role = next((role for role, begin in ROLES.items() if title.startswith(begin)), None)
            if role is not None:
                memory[f"{role} {process.pid}"] = process.memory_info().rss
    return memory


def _listens(process: psutil.Process, port: int | None) -> bool:
    with suppress(psutil.Error, IndexError):
        if process.cmdline()[0].startswith(ROLES["proxy"]):
            listening = (c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
            return any(connection.laddr.port == port for connection in listening)
    return False


TURNS = 4
WARM_UP = 2  # short requests before a quiet turn, which are not measured
RUSH_SECONDS = 0.5  # from the crowd's beginning to the first crowded request
SETTLE_SECONDS = 3.0  # after an attack, for the server to drop its last requests


@dataclass(frozen=True, kw_only=True)
class Bystander:
    """Seconds that short requests take from start to end.

    quiet         without a crowd
    crowded       while the crowd sends
    num_ended     the crowd's requests that ended meanwhile
    crowd_errors  the kinds of failures among the crowd's requests; refused requests load a server as well
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
    session: aiohttp.ClientSession, target: Target, *, attackers: Attackers, prompt: str, requests: int
) -> Bystander:
    """Send `requests` short requests in quiet, then as many beside the attackers, in `TURNS` turns.

    Raises `RuntimeError` if a short request fails, or if no request of the crowd ends meanwhile.
    """
    quiet: list[float] = []
    crowded: list[float] = []
    endings: Endings = []
    with CrowdProcess(attackers) as crowd:
        for turn in range(TURNS):
            count = requests // TURNS + (turn < requests % TURNS)
            await _short(session, target, prompt, WARM_UP)
            quiet += await _short(session, target, prompt, count)
            await crowd.begin(turn)
            try:
                await asyncio.sleep(RUSH_SECONDS)
                crowded += await _short(session, target, prompt, count)
            finally:
                endings += await crowd.stop()
            await asyncio.sleep(SETTLE_SECONDS)
    if not endings:
        raise RuntimeError(f"no request of the crowd ({attackers.attack}) was answered meanwhile; raise --requests")
    errors = sorted({error for error in endings if error is not None})
    return Bystander(quiet=tuple(quiet), crowded=tuple(crowded), num_ended=len(endings), crowd_errors=tuple(errors))


async def _short(session: aiohttp.ClientSession, target: Target, prompt: str, count: int) -> list[float]:
    seconds = []
    for number in range(count):
        record = await record_stream(session, target, f"{prompt} {number}", time.perf_counter())
        if record.error is not None:
            raise RuntimeError(f"a short request to {target.url} failed: {record.error}")
        seconds.append(record.seconds)
    return seconds


KEY = "OPENAI_API_KEY"
BYSTANDER = "bystander"
CHOICES = (*ATTACKS, HEADERS)
SHORT = "Tom has 12 pens and buys 9 pens. How many pens does Tom have now?"


def run(
    *,
    url: Annotated[str, Flag("The endpoint, without /v1.", MODEL)],
    model: Annotated[str | None, Flag("Its model.", MODEL, default="the first it serves")] = None,
    attacks: Annotated[
        tuple[str, ...], Flag(f"What the crowd sends, in turn: {', '.join(CHOICES)}.", DATA, commas=True)
    ] = ("prompts",),
    characters: Annotated[int, Ge(1), Flag("Length of a long text.", DATA)] = 100_000,
    crowd: Annotated[int, Ge(1), Flag("Senders of the attack.", LOAD)] = 8,
    requests: Annotated[int, Ge(4), Flag("Short requests in quiet, and as many beside the crowd.", LOAD)] = 40,
    max_tokens: Annotated[int, Ge(1), Flag("Tokens of a short request, at most.", LOAD)] = 16,
    request_seconds: RequestSeconds = 600.0,
    crowd_key: Annotated[
        str, Flag("The environment variable that holds the crowd's API key.", LOAD, metavar="VARIABLE")
    ] = KEY,
    one_client: Annotated[bool, Flag("Let the crowd send as the bystander's user.", LOAD)] = False,
    rounds: Annotated[int, Ge(1), Flag("How often to send all attacks.", LOAD)] = 1,
    memory: Annotated[bool, Flag("Print the memory of the server's processes on this machine.", LOAD)] = False,
) -> None:
    """Measure how long short requests take in quiet and beside a crowd, in turns, and print the ratio.

    python -m benchmarks bystander --url http://127.0.0.1:8000 --attacks prompts,stops --characters 100000

    The key of OPENAI_API_KEY, if there is one, is sent.

    A refused request is a load too, because the endpoint reads it first. The crowd and the bystander are two clients.
    A server without keys tells them apart by their field `user`, a server with keys by --crowd-key.
    """
    if unknown := [name for name in attacks if name not in CHOICES]:
        raise ValueError(f"--attacks {unknown[0]} is unknown; choose among {', '.join(CHOICES)}")
    if not {*attacks} & {*LONG}:
        refuse_given(run, f"where --attacks has no {' or '.join(LONG)}", characters=characters)
    if {*attacks} == {HEADERS}:
        refuse_given(run, "with --attacks headers, which no client sends", crowd_key=crowd_key, one_client=one_client)
    if crowd_key != KEY and not os.environ.get(crowd_key):
        raise ValueError(f"--crowd-key {crowd_key}: this environment variable holds nothing; put a key there")
    url = url.rstrip("/")
    user = BYSTANDER if one_client else CROWD
    if memory:
        _print_memory(url)
    for _ in range(rounds):
        for name in attacks:
            senders = partial(Attackers, attack=name, url=url, number=crowd, characters=characters, user=user)
            _print(name, asyncio.run(_measure(senders, url, model, max_tokens, requests, request_seconds, crowd_key)))
            if memory:
                _print_memory(url)


def _print_memory(url: str) -> None:
    memory = served_memory(url)
    print("memory, MiB: " + ", ".join(f"{name} {n / 2**20:.0f}" for name, n in memory.items()), end="; ")
    print(f"in all {sum(memory.values()) / 2**20:.0f}", flush=True)


def _print(attack: str, result: Bystander) -> None:
    print(f"{attack}:")
    for name, seconds in (("quiet", result.quiet), ("crowded", result.crowded)):
        median, slow = np.percentile(seconds, [50, 95])
        print(
            f"{name:>8}: {len(seconds)} requests, median {1e3 * median:.1f} ms, 95th percentile {1e3 * slow:.1f} ms, "
            f"slowest {1e3 * max(seconds):.1f} ms"
        )
    errors = f"; of them refused or failed: {', '.join(result.crowd_errors)}" if result.crowd_errors else ""
    print(f"beside {result.num_ended} requests of the crowd{errors}")
    print(
        f"crowded / quiet: median {result.ratio(50):.2f}, 95th percentile {result.ratio(95):.2f}, "
        f"slowest / quiet median {result.slowest:.2f}",
        flush=True,
    )


async def _measure(
    attackers: Callable[..., Attackers],
    url: str,
    model: str | None,
    max_tokens: int,
    requests: int,
    seconds: float,
    crowd_key: str,
) -> Bystander:
    async with open_session(seconds=seconds, api_key=os.environ.get(KEY)) as session:
        models = await served_models(session, url)
        if model is None and not models:
            raise RuntimeError(f"{url} serves no model")
        name = model or models[0]
        target = Target(
            name="bystander",
            url=url,
            model=name,
            route="completions",
            max_tokens=max_tokens,
            extra={"user": BYSTANDER},
        )
        crowd = attackers(model=name, seconds=seconds, api_key=os.environ.get(crowd_key))
        return await measure_bystander(session, target, attackers=crowd, prompt=SHORT, requests=requests)


main = command(run, "python -m benchmarks bystander")
