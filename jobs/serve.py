"""Serve a model over OpenAI's HTTP API: the options."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.serving.args import BODY_BYTES, REQUEST_SECONDS, RETRY_SECONDS, ModelArgs
from jobs.command_line import (
    CLUSTER,
    ENGINE,
    MODEL,
    OUTPUT,
    KvMemoryFraction,
    MaxRows,
    ModelName,
    NumPages,
    TensorParallel,
    Threads,
    command,
)
from mbd_core.engine.config import LEAST_SLOTS, EngineConfig
from mbd_core.models.model_config import Parts
from mbd_core.serving.api.access import DRAIN_SECONDS
from mbd_core.serving.api.parsing import MAX_PROMPTS, MOST_PROMPTS

MODEL_DEFAULTS = ModelArgs(model="")
LIMITS = (
    "gateways",
    "request_seconds",
    "retry_seconds",
    "drain_seconds",
    "client_requests",
    "body_bytes",
    "body_prompts",
)

Name = Annotated[
    str | None, typer.Option(help="What clients call it (default: the folder's name).", rich_help_panel=MODEL)
]
Fp8 = Annotated[
    Parts | None,
    typer.Option(
        help="FP8 weights: round the experts' or all layers', or keep the experts of an FP8 folder and their blocks.",
        rich_help_panel=MODEL,
    ),
]
Host = Annotated[
    str, typer.Option(help="Address to listen on; others than loopback want --api-keys.", rich_help_panel=CLUSTER)
]
Port = Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535, rich_help_panel=CLUSTER)]
Replicas = Annotated[
    int, typer.Option(help="Engines in parallel, each with its own copy of the model.", min=1, rich_help_panel=CLUSTER)
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        help="How long requests under way may go on after the first Ctrl-C or SIGTERM; 0 cuts them at once.",
        min=0,
        rich_help_panel=CLUSTER,
    ),
]
Gateways = Annotated[
    int, typer.Option(help="Processes that speak HTTP and hold the streams.", min=1, rich_help_panel=CLUSTER)
]
RequestSeconds = Annotated[
    float,
    typer.Option(help="Time limit of a request, its wait and its stream included.", min=1, rich_help_panel=CLUSTER),
]
RetrySeconds = Annotated[
    float,
    typer.Option(
        help="How long a request looks for another replica after its own has died.", min=0, rich_help_panel=CLUSTER
    ),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Serve only clients with a key of this file: lines of a client's name and its key; read when it changes.",
        rich_help_panel=CLUSTER,
    ),
]
ClientRequests = Annotated[
    int | None,
    typer.Option(
        help="Choices, n for each prompt, that the client of a key of --api-keys may have under way at each gateway.",
        min=1,
        rich_help_panel=CLUSTER,
    ),
]
BodyBytes = Annotated[
    int, typer.Option(help="The largest body of a request; more is 413.", min=1024, rich_help_panel=CLUSTER)
]
BodyPrompts = Annotated[
    int, typer.Option(help="The most prompts of one body.", min=1, max=MOST_PROMPTS, rich_help_panel=CLUSTER)
]
BufferSize = Annotated[
    int | None,
    typer.Option(
        help="Slots a sequence, the most that a request may ask for (default: as many as the model decodes with, at "
        f"least {LEAST_SLOTS}).",
        min=1,
        rich_help_panel=ENGINE,
    ),
]
BlockBudget = Annotated[
    int | None,
    typer.Option(
        help="Blocks that all running sequences together may grow to have: many each when idle, one when saturated.",
        min=1,
        rich_help_panel=ENGINE,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(help="For a model that was trained without blocks (LLaDA, Dream).", min=1, rich_help_panel=ENGINE),
]
MaxWaiting = Annotated[
    int,
    typer.Option(help="Requests that wait for a batch row of a replica; more get 429.", min=1, rich_help_panel=ENGINE),
]
PrefixCaching = Annotated[
    bool, typer.Option(help="Keep stored blocks for requests that begin alike.", rich_help_panel=ENGINE)
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Compute every request by itself: slower, its numbers are the same whatever runs beside it.",
        rich_help_panel=ENGINE,
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The attention kernel (default: the best there is); of an unknown one, the error names those there are.",
        rich_help_panel=ENGINE,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write step traces, each replica's in a folder in DIR.", rich_help_panel=OUTPUT),
]


def run(
    model: ModelName,
    name: Name = None,
    fp8: Fp8 = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    replicas: Replicas = 1,
    gateways: Gateways = 1,
    request_seconds: RequestSeconds = REQUEST_SECONDS,
    retry_seconds: RetrySeconds = RETRY_SECONDS,
    drain_seconds: DrainSeconds = DRAIN_SECONDS,
    api_keys: ApiKeys = None,
    client_requests: ClientRequests = None,
    body_bytes: BodyBytes = BODY_BYTES,
    body_prompts: BodyPrompts = MAX_PROMPTS,
    tensor_parallel: TensorParallel = 1,
    max_rows: MaxRows = EngineConfig.max_rows,
    buffer_size: BufferSize = EngineConfig.buffer_size,
    num_pages: NumPages = EngineConfig.num_pages,
    kv_memory_fraction: KvMemoryFraction = EngineConfig.kv_memory_fraction,
    max_waiting: MaxWaiting = MODEL_DEFAULTS.max_waiting,
    prefix_caching: PrefixCaching = EngineConfig.prefix_caching,
    batch_invariant: BatchInvariant = EngineConfig.batch_invariant,
    attention: Attention = EngineConfig.attention,
    block_budget: BlockBudget = EngineConfig.block_budget,
    block_size: BlockSize = EngineConfig.block_size,
    threads: Threads = MODEL_DEFAULTS.threads,
    trace: Trace = None,
) -> None:
    """Serve a model over OpenAI's HTTP API, until Ctrl-C or SIGTERM.

    It runs on the cluster of RAY_ADDRESS, or on a local one of its own, and stops what it started. The first signal
    refuses new requests (503) and lets those under way end, for --drain-seconds at most; a second one stops at once.

    Exit codes: 0 stopped, 1 it could not be served, 2 bad input (a model that is not whole, a port that is taken).
    """
    args = ModelArgs(
        model=model,
        name=name,
        replicas=replicas,
        tensor_parallel=tensor_parallel,
        engine=EngineConfig(
            max_rows=max_rows,
            buffer_size=buffer_size,
            block_size=block_size,
            block_budget=block_budget,
            num_pages=num_pages,
            kv_memory_fraction=kv_memory_fraction,
            prefix_caching=prefix_caching,
            batch_invariant=batch_invariant,
            attention=attention,
        ),
        max_waiting=max_waiting,
        threads=threads,
        trace=None if trace is None else str(trace),
        fp8=fp8,
    )
    limits = (gateways, request_seconds, retry_seconds, drain_seconds, client_requests, body_bytes, body_prompts)
    serve_model(args, host, port, api_keys, dict(zip(LIMITS, limits, strict=True)))


def serve_model(args: ModelArgs, host: str, port: int, api_keys: Path | None, limits: dict[str, Any]) -> None:
    """Serve until a signal, once what can be checked has been."""
    from actors.serving.args import check_client_requests
    from mbd_core.serving.api.access import read_keys

    args.checked()
    check_client_requests(limits["client_requests"], api_keys)
    if api_keys is not None:
        read_keys(api_keys)
        limits["api_keys"] = api_keys.resolve()  # gateways have other working folders

    from actors.serving.serve import check_port, serve_until_stopped  # importing Ray takes seconds: bad input first

    check_port(host, port)
    serve_until_stopped(args, host=host, port=port, **limits)


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
