"""Benchmark an endpoint under load: the options, the rounds, and the tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from benchmarks.load.endpoints import Asking, measure, own_sides, url_sides
from benchmarks.load.stream_client import AskedPrompt, RequestSeconds, StreamRoute
from jobs.command_line import JsonFile, MaxTokens, Seed
from mbd_core.batch.tool_chats import ToolChat
from mbd_core.command_line import Changes, CommandText, command
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.tasks.benchmarks import TASKS, find_task
from mbd_core.evaluation.tasks.kinds.function_calls import FREE, NAME
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.fields import CLUSTER, DATA, DECODING, ENGINE, LOAD, MODEL, MOST, OUTPUT, Flag, Ge, Gt, Le, load
from mbd_core.files import check_new_file, file_beside, write_json
from mbd_core.json_text import parse_json
from mbd_core.models.shapes import SHAPES

if TYPE_CHECKING:
    from benchmarks.load.loads import Load


def run(
    command_line: CommandText,
    *,
    url: Annotated[
        tuple[str, ...],
        Flag(
            "An OpenAI endpoint, http://HOST:PORT; repeatable. Without it, our own endpoint is started and compared "
            "with its bare engine. OPENAI_API_KEY is sent if it is set.",
            MODEL,
        ),
    ] = (),
    model: Annotated[
        str | None,
        Flag(
            "With --url: the model's name at the endpoints (default: their only one). Else a shipped model, a "
            f"folder, or a shape with random weights: {', '.join(SHAPES)} (default: sdar-50m).",
            MODEL,
        ),
    ] = None,
    route: Annotated[StreamRoute, Flag("The route, under /v1.", MODEL)] = "chat/completions",
    task: Annotated[str, Flag(f"Whose problems are the prompts: {', '.join(TASKS)}.", DATA)] = "gsm-mini",
    data: Annotated[str | None, Flag("The file of a task that is not generated.", DATA, metavar="PATH")] = None,
    seed: Seed = 0,
    concurrency: Annotated[
        tuple[Annotated[int, Ge(1)], ...],
        Flag("Requests open at once.", LOAD, commas=True, default="1,4,16,64; with --rate none"),
    ] = (),
    rate: Annotated[
        tuple[Annotated[float, Gt(0), Le(MOST)], ...],
        Flag("Poisson arrivals a second.", LOAD, metavar="R,...", commas=True),
    ] = (),
    requests: Annotated[
        int | None,
        Ge(1),
        Flag(
            "Requests of each load in a round (default: twice the requests open at once, or 20 s of arrivals; "
            "at least 16).",
            LOAD,
        ),
    ] = None,
    repeats: Annotated[int, Ge(1), Flag("Rounds; the targets take turns in each.", LOAD)] = 3,
    warm_up: Annotated[int, Ge(0), Flag("Requests that warm up each target before the measured requests.", LOAD)] = 4,
    request_seconds: RequestSeconds = 600.0,
    max_tokens: MaxTokens = 64,
    extra_body: Annotated[
        tuple[str, ...],
        Flag(
            'More fields of each request, such as {"decoding": {"buffer_size": 4}}; once for all targets, or once '
            "for each --url.",
            DECODING,
            metavar="JSON",
        ),
    ] = (),
    engine: Annotated[
        dict[str, Any], Changes(EngineConfig, "max_rows", "buffer_size", "num_pages", default="as in mbd serve")
    ],
    threads: Annotated[int | None, Ge(1), Flag("Torch's threads, each rank's.", ENGINE, default="1")] = None,
    replicas: Annotated[
        tuple[Annotated[int, Ge(1)], ...],
        Flag("Replicas; an endpoint of ours for each number.", CLUSTER, default="1", commas=True),
    ] = (),
    slo: Annotated[
        str | None, Flag("Count the requests within these limits.", OUTPUT, metavar="ttft=MS,tpot=MS,e2e=MS")
    ] = None,
    json: JsonFile = None,
    plot: Annotated[Path | None, Flag("Also draw latency and throughput.", OUTPUT, metavar="FILE")] = None,
) -> None:
    """Load endpoints with streamed requests, and print their latencies, throughput and goodput beside each other.

    Without --url our own endpoint is started and compared with its bare engine. Both get the same prompts, decoding
    and load in one run, alternately. The command then starts a local Ray for itself and joins no Ray that is running,
    also where RAY_ADDRESS is set. benchmarks/README.md explains the columns.
    """
    from benchmarks.load.rows import build_report, draw_load, parse_objective, print_report

    for path in filter(None, (json, plot)):
        check_new_file(path)
    objective = None if slo is None else parse_objective(slo)
    loads = _loads(concurrency, rate, seed)
    counts = [requests or _requests_of(load) for load in loads]
    extra = [
        load(dict[str, Any], parse_json(text, f"--extra-body {text!r}"), path="--extra-body.")
        for text in extra_body or ("{}",)
    ]
    asking = Asking(model=model, route=route, max_tokens=max_tokens, extra=extra, seconds=request_seconds)
    own_options = {**engine, "threads": threads, "replicas": replicas or None}
    _check_options(url, asking, [name for name, value in own_options.items() if value is not None])
    prompts = prompts_of(task, route, data, seed, count=warm_up + repeats * sum(counts))
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        if url:
            sides = url_sides(url, asking)
        else:
            config = EngineConfig(**engine)
            sides = stack.enter_context(own_sides(asking, config, threads=threads or 1, replicas=replicas or (1,)))
        runs = measure(sides, loads, counts, prompts, warm_up=warm_up, repeats=repeats)
    report = build_report(runs, loads, objective)
    report["settings"] = {
        "command": command_line,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
        "requests": {str(load): count for load, count in zip(loads, counts, strict=True)},
    }
    if json is not None:
        write_json(json, report)
    if plot is not None:
        with file_beside(plot) as file:
            draw_load(report["rows"], file)
    print_report(report)


# -- options, loads and prompts -------------------------------------------------------------------------------------


def _loads(concurrency: Sequence[int], rates: Sequence[float], seed: int) -> list[Load]:
    """The loads in the order of the options."""
    from benchmarks.load.loads import Concurrency, Poisson

    sizes = concurrency or (() if rates else (1, 4, 16, 64))
    return [*map(Concurrency, sizes), *(Poisson(rate, seed) for rate in rates)]


def _requests_of(load: Load) -> int:
    from benchmarks.load.loads import Concurrency

    return max(16, 2 * load.size if isinstance(load, Concurrency) else round(20 * load.rate))


def _check_options(urls: Sequence[str], asking: Asking, own_options: Sequence[str]) -> None:
    """Raise `ValueError` for options that exclude each other; `own_options` are the options of our own endpoint."""
    if len(asking.extra) > 1 and len(asking.extra) != len(urls):
        raise ValueError(f"--extra-body is given {len(asking.extra)} times; give it once, or once for each --url")
    if urls:
        if own_options:
            option = f"--{own_options[0].replace('_', '-')}"
            raise ValueError(f"{option} sets up our own endpoint, which is not started with --url; leave it out")
        return
    others = sorted(set(asking.extra[0]) - {"decoding"})
    if others:
        raise ValueError(
            f"--extra-body: '{others[0]}' cannot be asked of the engine alone; without --url give decoding only"
        )


def prompts_of(name: str, route: StreamRoute, data: str | None, seed: int, *, count: int) -> list[AskedPrompt]:
    """Different prompts: in a prefix cache they share only the pages of the chat's beginning."""
    task = find_task(name)
    if name.startswith(f"{FREE}:"):
        raise ValueError(f"--task {name} decodes calls without a grammar, which no endpoint does: take {NAME}:")
    if task.asks_calls and route == "completions":
        raise ValueError(f"--task {name} asks chats with functions: take --route chat/completions")
    problems = load_problems(task, seed=seed, limit=count, data=data).problems
    if len(problems) < count:
        raise ValueError(
            f"{data or name} holds {len(problems)} prompts and {count} are sent; lower --requests or --repeats"
        )
    return [(task.asks_calls and ToolChat.of_input(problem.prompt)) or problem.prompt for problem in problems]


main = command(run, "python -m benchmarks serve")
