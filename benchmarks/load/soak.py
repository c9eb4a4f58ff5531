"""A soak test of an endpoint of our own: the options, the load with killed replicas, and the verdict."""

import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.load.endpoints import OwnEndpoint, own_endpoint
from benchmarks.load.soak_parts import EndedRequest, SoakClient, SoakWatch, memory_rows
from benchmarks.load.stream_client import Target, open_session, served_models
from benchmarks.measuring import markdown
from jobs.command_line import JsonFile, MaxTokens, ModelName, Seed
from mbd_core.command_line import CommandText, Fields, command
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.fields import CLUSTER, LOAD, OUTPUT, Flag, Ge
from mbd_core.files import check_new_file, write_json

SETTLE_SECONDS = 60.0
NUM_PROMPTS = 40
SMALL_ENGINE = EngineConfig(max_rows=8, num_pages=400)
END_COLUMNS = {k: k for k in ("request", "whole", "refused", "hung up", "error", "lost", "wrong")}
MEMORY_COLUMNS = {
    "role": "process",
    "processes": "processes",
    **{f"quarter_{n}": f"quarter {n} (MiB)|.0f" for n in (1, 2, 3, 4)},
    "flat": "flat",
}


def run(
    command_line: CommandText,
    *,
    model: ModelName = "tiny-mbd",
    seed: Seed = 0,
    minutes: Annotated[float, Ge(0.01), Flag("How long requests are sent.", LOAD)] = 10.0,
    clients: Annotated[int, Ge(1), Flag("Clients, each with one request at a time.", LOAD)] = 8,
    kill_every: Annotated[float, Ge(0), Flag("Seconds between kills of a replica; 0: none.", LOAD)] = 60.0,
    recovery_seconds: Annotated[float, Ge(1), Flag("Time limit of a recovery, and of a request.", LOAD)] = 300.0,
    max_tokens: MaxTokens = 96,
    engine: Annotated[EngineConfig, Fields("max_rows", "num_pages")] = SMALL_ENGINE,
    replicas: Annotated[int, Ge(1), Flag("Replicas of the engine.", CLUSTER)] = 2,
    sample_every: Annotated[float, Ge(0.1), Flag("Seconds between memory samples.", OUTPUT)] = 5.0,
    json: JsonFile = None,
) -> int:
    """Serve a model and load it for long: streams, whole answers, clients that hang up, bad requests, and replicas
    that are killed.

    The command starts a local Ray for itself and joins no Ray that is running, also where RAY_ADDRESS is set.

    The exit code is 1 if a request was lost or ended wrongly, if a page is held although nothing runs, or if memory
    grew.
    """
    if json is not None:
        check_new_file(json)
    serve = ["--model", model, "--replicas", str(replicas), "--max-rows", str(engine.max_rows)]
    serve += ["--num-pages", str(engine.num_pages), "--batch-invariant"]
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as scratch,
        own_endpoint(serve, log=Path(scratch) / "serve.log") as endpoint,
    ):
        load = soak(
            endpoint,
            replicas=replicas,
            seconds=60 * minutes,
            clients=clients,
            kill_every=kill_every,
            sample_every=sample_every,
            limit=recovery_seconds,
            max_tokens=max_tokens,
            seed=seed,
        )
        report = asyncio.run(load)
    report["settings"] = {"command": command_line}
    if json is not None:
        write_json(json, report)
    _print(report)
    return 1 if report["failures"] else 0


async def soak(
    endpoint: OwnEndpoint,
    *,
    replicas: int,
    seconds: float,
    clients: int,
    kill_every: float,
    sample_every: float,
    limit: float,
    max_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Load, kill, and report. `failures` in the report are sentences; the list is empty if all is well."""
    problems = load_problems(find_task("gsm-mini"), seed=seed, limit=NUM_PROMPTS).problems
    rng = random.Random(seed)
    async with open_session(seconds=limit) as session:
        (name,) = await served_models(session, endpoint.url)
        target = Target(name=name, url=endpoint.url, model=name, max_tokens=max_tokens)
        client = SoakClient(session, target, [p.prompt for p in problems], rng)
        watch = SoakWatch(endpoint, session)
        ends: list[EndedRequest] = []

        async def send_until_the_end() -> None:
            while watch.seconds < seconds:
                ends.append(await client.send())

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(send_until_the_end())
            group.create_task(watch.sample_memory(every=sample_every, until=seconds))
            if kill_every:
                kills = watch.kill_replicas(rng, every=kill_every, until=seconds, limit=limit)
                group.create_task(kills)
        idle = await watch.wait_until(
            lambda states: len(states) == replicas and not any(map(held_pages, states)), limit=SETTLE_SECONDS
        )
        states = await watch.replicas()
    rows, memory = end_rows(ends), memory_rows(watch.samples, seconds)
    report: dict[str, Any] = {
        "ends": rows,
        "details": dict(Counter(f"{e.kind}: {e.end}: {e.detail}" for e in ends if e.detail)),
        "memory": memory,
        "recoveries": watch.recoveries,
        "held_pages": [held_pages(state) for state in states],
    }
    return report | {"failures": failures(report, idle=idle)}


def held_pages(state: dict[str, Any]) -> int:
    """Pages that a replica's sequences hold, without the null page; 1 for a replica that does not answer."""
    kv_cache = state.get("kv_cache")
    return 1 if kv_cache is None else kv_cache["num_pages"] - 1 - kv_cache["free_pages"]


def end_rows(ends: Sequence[EndedRequest]) -> list[dict[str, Any]]:
    """The number of requests by kind and end."""
    kinds = sorted({entry.kind for entry in ends})
    counts: Counter[tuple[str, str]] = Counter((entry.kind, entry.end) for entry in ends)
    return [{"request": kind, **{end: counts[kind, end] for end in list(END_COLUMNS)[1:]}} for kind in kinds]


def failures(report: dict[str, Any], *, idle: bool) -> list[str]:
    """The soak's failures, each as a sentence."""
    sentences = []
    for end, text in (("lost", "were lost"), ("wrong", "ended in another way than promised")):
        if count := sum(row[end] for row in report["ends"]):
            sentences.append(f"{count} requests {text}")
    if not idle:
        pages = ", ".join(map(str, report["held_pages"]))
        sentences.append(f"{SETTLE_SECONDS:g} s after the last request the replicas hold pages: {pages}")
    for row in report["memory"]:
        if row["flat"] is False:
            growth = row["quarter_4"] - row["quarter_2"]
            sentences.append(f"the memory of a {row['role']} grew by {growth:.0f} MiB")
    return sentences


def _print(report: dict[str, Any]) -> None:
    print(markdown(report["ends"], END_COLUMNS))
    for detail, count in sorted(report["details"].items()):
        print(f"{count} x {detail}")
    print("\n" + markdown(report["memory"], MEMORY_COLUMNS))
    if report["recoveries"]:
        times = ", ".join(f"{seconds:.1f}" for seconds in report["recoveries"])
        print(f"\n{len(report['recoveries'])} replicas killed; all were ready again after {times} s")
    print(f"pages held at the end: {', '.join(map(str, report['held_pages']))}")
    for failure in report["failures"]:
        print(f"soak: {failure}", file=sys.stderr)


main = command(run, "python -m benchmarks soak")
