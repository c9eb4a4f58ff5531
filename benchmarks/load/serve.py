"""Benchmark an endpoint under load: the options, the rounds, and the tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.load.endpoints import Asking, measure, own_sides, url_sides
from benchmarks.load.stream_client import Route
from jobs.command_line import (
    DATA,
    DECODING,
    ENGINE,
    MODEL,
    OUTPUT,
    JsonFile,
    MaxRows,
    MaxTokens,
    NumPages,
    Seed,
    Threads,
    command,
    command_text,
)
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.tasks.benchmarks import TASKS, find_task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.files import check_new_file, file_beside, write_json
from mbd_core.models.shapes import SHAPES
from mbd_core.options import CLUSTER, json_object, numbers

if TYPE_CHECKING:
    from benchmarks.load.loads import Load

LOAD = "Load"
OWN_OPTIONS = ("replicas", "max_rows", "buffer_size", "num_pages", "threads")

Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        help="An OpenAI endpoint, http://HOST:PORT; repeatable. Without one, ours is started and measured beside its "
        "engine alone. OPENAI_API_KEY is sent where it is set.",
        rich_help_panel=MODEL,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="With --url: what the endpoints call it (default: the one that they serve). Else a shipped model, a "
        f"folder, or a shape with random weights: {', '.join(SHAPES)} (default: sdar-50m).",
        rich_help_panel=MODEL,
    ),
]
RouteName = Annotated[Route, typer.Option(help="The route, under /v1.", rich_help_panel=MODEL)]
TaskName = Annotated[
    str, typer.Option(help=f"Whose problems are the prompts: {', '.join(TASKS)}.", rich_help_panel=DATA)
]
DataFile = Annotated[
    str | None, typer.Option(metavar="PATH", help="The file of a task that is not generated.", rich_help_panel=DATA)
]
ConcurrencyList = Annotated[
    str | None, typer.Option(metavar="N,...", help="Requests open at once (default: 1,4,16,64).", rich_help_panel=LOAD)
]
Rates = Annotated[
    str | None, typer.Option("--rate", metavar="R,...", help="Poisson arrivals a second.", rich_help_panel=LOAD)
]
Requests = Annotated[
    int | None,
    typer.Option(
        help="Requests of each load in a round (default: 2 for each that is open at once, or 20 s of arrivals; at "
        "least 16).",
        min=1,
        rich_help_panel=LOAD,
    ),
]
Repeats = Annotated[int, typer.Option(help="Rounds; the targets take turns in each.", min=1, rich_help_panel=LOAD)]
WarmUp = Annotated[int, typer.Option(help="Requests to each target before it counts.", min=0, rich_help_panel=LOAD)]
RequestSeconds = Annotated[float, typer.Option(help="Time limit of a request.", min=0.1, rich_help_panel=LOAD)]
ExtraBody = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JSON",
        help='More fields of each request, such as {"decoding": {"buffer_size": 4}}; once for all targets, or once '
        "for each --url.",
        rich_help_panel=DECODING,
    ),
]
BufferSize = Annotated[
    int | None,
    typer.Option(
        help="Slots a sequence (default: as many as the model decodes with, at least 4).",
        min=1,
        rich_help_panel=ENGINE,
    ),
]
Replicas = Annotated[
    str, typer.Option(metavar="N,...", help="Replicas; an endpoint of ours for each number.", rich_help_panel=CLUSTER)
]
Slo = Annotated[
    str | None,
    typer.Option(
        metavar="ttft=MS,tpot=MS,e2e=MS", help="Count the requests within these limits.", rich_help_panel=OUTPUT
    ),
]
PlotFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also draw latency and throughput.", rich_help_panel=OUTPUT)
]


def run(
    context: typer.Context,
    *,
    url: Urls = None,
    model: Model = None,
    route: RouteName = "chat/completions",
    task: TaskName = "gsm-mini",
    data: DataFile = None,
    seed: Seed = 0,
    concurrency: ConcurrencyList = None,
    rate: Rates = None,
    requests: Requests = None,
    repeats: Repeats = 3,
    warm_up: WarmUp = 4,
    request_seconds: RequestSeconds = 600.0,
    max_tokens: MaxTokens = 64,
    extra_body: ExtraBody = None,
    max_rows: MaxRows = EngineConfig.max_rows,
    buffer_size: BufferSize = EngineConfig.buffer_size,
    num_pages: NumPages = EngineConfig.num_pages,
    threads: Threads = 1,
    replicas: Replicas = "1",
    slo: Slo = None,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Load endpoints with streamed requests, and print their latencies, throughput and goodput beside each other.

    Without --url our own endpoint is started on a Ray of its own and measured beside its engine alone: the same
    prompts, decoding and load, in the same run, in turn. benchmarks/README.md explains the columns.
    """
    from benchmarks.load.rows import build_report, draw_load, parse_objective, print_report

    for path in filter(None, (json, plot)):
        check_new_file(path)
    objective = None if slo is None else parse_objective(slo)
    loads = _loads(concurrency, rate, seed)
    counts = [requests or _requests_of(load) for load in loads]
    extra = [json_object(text, "--extra-body") for text in extra_body or ["{}"]]
    asking = Asking(model=model, route=route, max_tokens=max_tokens, extra=extra, seconds=request_seconds)
    _check_options(context, url, asking)
    prompts = _prompts(task, data, seed, count=warm_up + repeats * sum(counts))
    busy = os.getloadavg()[0]
    with ExitStack() as started:
        if url:
            sides = url_sides(url, asking)
        else:
            engine = EngineConfig(max_rows=max_rows, buffer_size=buffer_size, num_pages=num_pages)
            sizes = numbers(replicas, "--replicas")
            sides = started.enter_context(own_sides(asking, engine, threads=threads, replicas=sizes))
        runs = measure(sides, loads, counts, prompts, warm_up=warm_up, repeats=repeats)
    report = build_report(runs, loads, objective)
    report["settings"] = {
        "command": command_text(context),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load_average": {"before": busy, "after": os.getloadavg()[0]},
        "requests": {str(load): count for load, count in zip(loads, counts, strict=True)},
    }
    if json is not None:
        write_json(json, report)
    if plot is not None:
        with file_beside(plot) as beside:
            draw_load(report["rows"], beside)
    print_report(report)


# -- what is asked for --------------------------------------------------------------------------------------------


def _loads(concurrency: str | None, rate: str | None, seed: int) -> list[Load]:
    """The loads in the order of the options."""
    from benchmarks.load.loads import Concurrency, Poisson

    if concurrency is None and rate is None:
        concurrency = "1,4,16,64"
    loads: list[Load] = [] if concurrency is None else [Concurrency(n) for n in numbers(concurrency, "--concurrency")]
    for text in (rate or "").split(",") if rate is not None else ():
        try:
            loads.append(Poisson(float(text), seed))
        except ValueError:
            raise ValueError(f"--rate '{text}' must be a number of requests a second above 0") from None
    return loads


def _requests_of(load: Load) -> int:
    from benchmarks.load.loads import Concurrency

    return max(16, 2 * load.size if isinstance(load, Concurrency) else round(20 * load.rate))


def _check_options(context: typer.Context, urls: Sequence[str] | None, asking: Asking) -> None:
    """Raise `ValueError` for options that cannot be honoured together."""
    if len(asking.extra) > 1 and len(asking.extra) != len(urls or ()):
        raise ValueError(f"--extra-body is given {len(asking.extra)} times; give it once, or once for each --url")
    if urls:
        for name in OWN_OPTIONS:
            if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} sets up our own endpoint, which is not started with --url; leave it out")
        return
    more = sorted(set(asking.extra[0]) - {"decoding"})
    if more:
        raise ValueError(
            f"--extra-body: '{more[0]}' cannot be asked of the engine alone; without --url give decoding only"
        )


def _prompts(task: str, data: str | None, seed: int, *, count: int) -> list[str]:
    """Different prompts, so that none finds another's pages in a prefix cache but those that all chats begin with."""
    problems = load_problems(find_task(task), seed=seed, limit=count, data=data).problems
    if len(problems) < count:
        raise ValueError(f"{data} holds {len(problems)} prompts and {count} are sent; lower --requests or --repeats")
    return [problem.prompt for problem in problems]


main = command(run, "python -m benchmarks serve")
