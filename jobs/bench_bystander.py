"""A bystander's latency while a crowd attacks, as a ratio to its quiet one."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated

import numpy as np
import typer

from jobs.command_line import DATA, MODEL, command, names
from jobs.load.attacks import ATTACKS, CROWD, HEADERS
from jobs.load.bystander import Bystander, measure_bystander
from jobs.load.memory import served_memory
from jobs.load.stream_client import Target, open_session, served_models

LOAD = "Load"  # a panel of --help
KEY = "OPENAI_API_KEY"
BYSTANDER = "bystander"
SETTLE_SECONDS = 3.0  # after an attack, for its last requests to be dropped
CHOICES = (*ATTACKS, HEADERS)
SHORT = "Tom has 12 pens and buys 9 pens. How many pens does Tom have now?"


def run(
    url: Annotated[str, typer.Option(help="The endpoint, without /v1.", rich_help_panel=MODEL)],
    model: Annotated[
        str | None, typer.Option(help="Its model.", show_default="the first it serves", rich_help_panel=MODEL)
    ] = None,
    attacks: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help=f"What the crowd sends, in turn: {', '.join(CHOICES)}.", rich_help_panel=DATA
        ),
    ] = "prompts",
    characters: Annotated[int, typer.Option(help="Of a long text.", min=1, rich_help_panel=DATA)] = 100_000,
    crowd: Annotated[int, typer.Option(help="Senders of the attack.", min=1, rich_help_panel=LOAD)] = 8,
    requests: Annotated[
        int,
        typer.Option(help="Short requests in quiet, and as many beside the crowd's.", min=4, rich_help_panel=LOAD),
    ] = 40,
    max_tokens: Annotated[int, typer.Option(help="Of a short request.", min=1, rich_help_panel=LOAD)] = 16,
    request_seconds: Annotated[
        float, typer.Option(help="Time limit of a request.", min=0.1, rich_help_panel=LOAD)
    ] = 600.0,
    crowd_key: Annotated[
        str,
        typer.Option(
            metavar="VARIABLE", help="The environment variable that holds the crowd's API key.", rich_help_panel=LOAD
        ),
    ] = KEY,
    one_client: Annotated[
        bool, typer.Option("--one-client", help="The crowd's bodies name the bystander's user.", rich_help_panel=LOAD)
    ] = False,
    rounds: Annotated[int, typer.Option(help="How often to send all attacks.", min=1, rich_help_panel=LOAD)] = 1,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory", help="Print what the server's processes hold, which run on this machine.", rich_help_panel=LOAD
        ),
    ] = False,
) -> None:
    """Measure how long short requests take in quiet and beside a crowd's, in turns, and print the ratio.

    python jobs/bench_bystander.py --url http://127.0.0.1:8000 --attacks prompts,stops --characters 100000

    The key of OPENAI_API_KEY, if there is one, is sent.

    A request that the endpoint refuses after it has looked at it is a load too. The crowd and the bystander are two
    clients: on a server without keys by their field `user`, on one with keys where --crowd-key names another one.
    """
    chosen = names(attacks, "--attacks")
    if unknown := [name for name in chosen if name not in CHOICES]:
        raise ValueError(f"--attacks {unknown[0]} is unknown; choose among {', '.join(CHOICES)}")
    if crowd_key != KEY and not os.environ.get(crowd_key):
        raise ValueError(f"--crowd-key {crowd_key}: this environment variable holds nothing; put a key there")
    url = url.rstrip("/")
    user = BYSTANDER if one_client else CROWD
    if memory:
        _print_memory(url)
    for _ in range(rounds):
        for name in chosen:
            load = partial(
                measure_bystander, attack=name, characters=characters, requests=requests, crowd=crowd, user=user
            )
            _print(name, asyncio.run(_measure(load, url, model, max_tokens, request_seconds, crowd_key)))
            if memory:
                time.sleep(SETTLE_SECONDS)
                _print_memory(url)


def _print_memory(url: str) -> None:
    held = served_memory(url)
    print("memory, MiB: " + ", ".join(f"{name} {n / 2**20:.0f}" for name, n in held.items()), end="; ")
    print(f"in all {sum(held.values()) / 2**20:.0f}", flush=True)


def _print(attack: str, found: Bystander) -> None:
    print(f"{attack}:")
    for name, seconds in (("quiet", found.quiet), ("crowded", found.crowded)):
        middle, late = np.percentile(seconds, [50, 95])
        print(
            f"{name:>8}: {len(seconds)} requests, median {1e3 * middle:.1f} ms, 95th percentile {1e3 * late:.1f} ms, "
            f"slowest {1e3 * max(seconds):.1f} ms"
        )
    errors = f"; of them refused or failed: {', '.join(found.crowd_errors)}" if found.crowd_errors else ""
    print(f"beside {found.num_ended} requests of the crowd{errors}")
    print(
        f"crowded / quiet: median {found.ratio(50):.2f}, 95th percentile {found.ratio(95):.2f}, "
        f"slowest / quiet median {found.slowest:.2f}",
        flush=True,
    )


async def _measure(
    load: Callable[..., Awaitable[Bystander]],
    url: str,
    model: str | None,
    max_tokens: int,
    seconds: float,
    crowd_key: str,
) -> Bystander:
    keys = [os.environ.get(name) for name in (KEY, crowd_key)]
    async with (
        open_session(seconds=seconds, api_key=keys[0]) as session,
        open_session(seconds=seconds, api_key=keys[1]) as crowd_session,
    ):
        served = await served_models(session, url)
        if model is None and not served:
            raise RuntimeError(f"{url} serves no model")
        target = Target(
            name="bystander",
            url=url,
            model=model or served[0],
            route="completions",
            max_tokens=max_tokens,
            extra={"user": BYSTANDER},
        )
        return await load(session, target, crowd_session=crowd_session, prompt=SHORT)


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
