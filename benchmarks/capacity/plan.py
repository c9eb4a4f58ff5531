"""The number of replicas for a load: the batch that fits and meets the limits on latency, by its steps' seconds."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from benchmarks.capacity.counted_blocks import CountedAnswer, FillRate, counted_answer, rate_for
from benchmarks.capacity.step_model import CHUNK, Deployment, StepModel, Work, prompt_work
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.engine.schedule.pacing import LEAST_LIMIT, QUIET_STEPS
from mbd_core.fields import DATA, DECODING, ENGINE, LOAD, MOST, Flag, Ge, Gt, Le, configuration
from mbd_core.models.model_config import ModelConfig

BATCHES = (1, *range(2, 257, 2))


@configuration(panel=LOAD)
class Demand:
    """Requests a second of one kind, and each request's promised latencies."""

    rate: Annotated[float, Gt(0), Le(MOST)] = 10.0
    """Requests a second, on all replicas together."""
    context: Annotated[int, Ge(1), Flag(panel=DATA)] = 2048
    """Tokens of a prompt."""
    found: Annotated[float, Ge(0), Le(1), Flag(panel=DATA)] = 0.0
    """Share of a prompt that the prefix cache holds."""
    output: Annotated[int, Ge(1), Flag(panel=DATA)] = 256
    """Tokens of an answer."""
    ttft: Annotated[float | None, Gt(0)] = None
    """Milliseconds to the first tokens, at most, on average (default: no limit)."""
    speed: Annotated[float | None, Gt(0)] = None
    """Tokens a second of an answer under way, at least (default: no limit)."""
    tpf: Annotated[tuple[float, ...], Flag(panel=DECODING, commas=True)] = (3.47, 6.19)
    """Tokens a forward with each of --buffer's slots, as Table 3 has them for one and two."""
    max_step_seconds: Annotated[float | None, Gt(0), Flag(panel=ENGINE)] = None
    """Seconds of a step that stores a prompt beside others (default: the engine's)."""
    buffer: Annotated[tuple[Annotated[int, Ge(1)], ...], Flag(panel=DECODING, commas=True)] = (1, 2)
    """Slots of a sequence, to compare."""

    def __post_init__(self) -> None:
        if len(self.tpf) != len(self.buffer):
            raise ValueError(f"tpf has {len(self.tpf)} numbers and buffer {len(self.buffer)}; give one for each")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a replica runs: the seconds of its steps, and its memory for pages.

    page_bytes  bytes of one rank's memory for pages
    static      whether every slot is sent through the model (Alg. 5), and prompts have a forward of their own
    """

    name: str
    config: ModelConfig
    steps: StepModel
    page_bytes: float
    static: bool

    @property
    def page_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return int(self.page_bytes / self.steps.cost.kv_token_bytes)


def gpu_place(deployment: Deployment) -> Place:
    """A deployment's GPUs, as an engine uses them: static steps."""
    return Place(
        name=deployment.describe(),
        config=deployment.config,
        steps=deployment.steps(),
        page_bytes=deployment.page_bytes,
        static=True,
    )


def decode_work(place: Place, answer: CountedAnswer, demand: Demand, *, rows: int, buffer_size: int) -> Work:
    """A step in which `rows` sequences decode, half of their answers behind them."""
    size = place.config.block_size
    length = demand.context + demand.output // 2
    live = round(rows * answer.blocks * size)
    tokens = _power_of_two(rows) * buffer_size * size if place.static else live
    open_share = 0.5  # fraction of an active block's positions that are open, on average
    return Work(
        tokens=tokens,
        live_tokens=live,
        scores=live * length + tokens - live,
        kv_tokens=rows * length,
        logit_tokens=round(rows * answer.open_blocks * size * (1.0 if place.static else open_share)),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def prompt_forwards(place: Place, demand: Demand, *, beside: float | None = None) -> list[Work]:
    """The forwards that store the new part of a prompt, chunk by chunk.

    `beside` is the seconds of a decoding step in which a chunk is stored too. The engine's pacer then shortens chunks.
    """
    size = place.config.block_size
    start, stop = (int(length) // size * size for length in (demand.context * demand.found, demand.context))
    most = math.inf
    if beside is not None:
        most = (demand.max_step_seconds or max(LEAST_LIMIT, QUIET_STEPS * beside)) - beside
    chunks: list[Work] = []
    while start < stop:
        blocks = min(CHUNK, stop - start) // size

        def chunk(number: int, start: int = start) -> Work:
            return replace(prompt_work(start, start + number * size, block_size=size), launched=place.static)

        if place.steps.forward(chunk(blocks)) > most:
            seconds = [place.steps.forward(chunk(number)) for number in range(1, blocks + 1)]
            blocks = max(1, bisect_right(seconds, most))
        chunks.append(chunk(blocks))
        start += blocks * size
    return chunks


MOST_QUEUED = 0.9  # largest share of the time in which a prompt is being stored, so that the queue of prompts is short


def plans(place: Place, demand: Demand, decoding: DecodingConfig, rate: FillRate) -> Iterator[dict[str, Any]]:
    """A row for each batch, a mean number of decoding sequences.

    A step of `batch` sequences takes s seconds. A request takes p seconds for the n chunks of its prompt, and F
    forwards. So a replica serves r = 1 / (p + F s / batch) requests a second, and s / (1 - r p) seconds lie between
    two decoding steps. Each chunk stands before a decoding step, so a prompt is stored in n s + p seconds, one prompt
    after the other: a queue with one server, random arrivals and equal service times. The number of rows is three
    standard deviations above the mean of the batch, and all rows must fit.
    """
    answer = counted_answer(rate, decoding, length=demand.output)
    tokens_each = demand.context + demand.output + decoding.buffer_size * place.config.block_size
    for batch in BATCHES:
        rows = batch + math.ceil(3 * math.sqrt(batch))
        work = decode_work(place, answer, demand, rows=batch, buffer_size=decoding.buffer_size)
        step = place.steps.step([work])
        chunks = prompt_forwards(place, demand, beside=step.seconds)
        prompt = sum(place.steps.forward(work) for work in chunks)
        served = 1 / (prompt + answer.forwards * step.seconds / batch)
        between = step.seconds / (1 - served * prompt)
        storing = prompt + max(0, len(chunks) - 1) * step.seconds  # the last chunk's step decodes already
        queued = served * storing
        if queued > MOST_QUEUED:
            return
        wait = queued * storing / (2 * (1 - queued))
        yield {
            "buffer": decoding.buffer_size,
            "batch": batch,
            "rows": rows,
            "step_seconds": step.seconds,
            "bound": step.bound,
            "prompt_share": served * prompt,
            "served": served,
            "replicas": math.ceil(demand.rate / served),
            "ttft_seconds": between / 2 + wait + storing + answer.first * between,
            "speed": demand.output / (answer.forwards * between),
            "weights_gb": place.steps.cost.stored_bytes / 1e9,
            "kv_gb": min(place.page_tokens, rows * tokens_each) * place.steps.cost.kv_token_bytes / 1e9,
            "fits": rows * tokens_each <= place.page_tokens,
        }


PLAN_COLUMNS = {
    "buffer": "N_buf",
    "tpf": "TPF|.2f",
    "batch": "batch",
    "rows": "rows",
    "step_seconds": "step (ms)|.2f",
    "bound": "bound by",
    "prompt_share": "prompts' share|.0%",
    "ttft_seconds": "TTFT (ms)|.0f",
    "speed": "tok/s a request|.0f",
    "served": "requests/s a replica|.2f",
    "replicas": "replicas",
    "weights_gb": "weights, GB a GPU|.1f",
    "kv_gb": "KV, GB a GPU|.1f",
}


def best_plan(place: Place, demand: Demand, *, buffer_size: int, tpf: float) -> dict[str, Any]:
    """The batch with which the fewest replicas meet the demand; among equals, the batch with the shortest steps.

    `bound` names the reason against a larger batch: the longest term of the step, "memory", the limits on "latency",
    or "prompts", which would wait to be stored. Raises `ValueError` if no batch meets the limits, and says what a
    single request would get.
    """
    decoding = DecodingConfig(block_size=place.config.block_size, buffer_size=buffer_size)
    rows = list(plans(place, demand, decoding, rate_for(tpf, decoding, length=demand.output)))
    meeting = [row for row in rows if _meets(row, demand)]
    if not rows:
        raise ValueError(
            f"{place.name} with {buffer_size} slots has no time for prompts of {demand.context} tokens: beside a "
            f"decoding step they are stored in chunks so short that one prompt waits for another; raise "
            f"--max-step-seconds, or take more ranks or fewer bytes (--fp8)"
        )
    if not meeting:
        alone = rows[0]
        raise ValueError(
            f"{place.name} with {buffer_size} slots cannot meet the limits: alone a request has its first tokens "
            f"after {1e3 * alone['ttft_seconds']:.0f} ms and {alone['speed']:.0f} tokens a second; "
            f"{_what_helps(demand, alone)}"
        )
    fitting = [row for row in meeting if row["fits"]]
    if not fitting:
        number, length = meeting[0]["rows"], demand.context + demand.output
        raise ValueError(
            f"{place.name} has room for {place.page_tokens} tokens, and {number} sequences of {length} need "
            f"{number * length}; {place.page_tokens // number} each would fit"
        )
    best = min(fitting, key=lambda row: (row["replicas"], row["step_seconds"]))
    larger = next((row for row in rows if row["replicas"] < best["replicas"]), None)
    if larger is None and best["replicas"] > 1 and len(rows) < len(BATCHES):
        best["bound"] = "prompts"
    elif larger is not None:
        best["bound"] = "latency" if not _meets(larger, demand) else "memory"
    return {**best, "tpf": tpf}


def _meets(row: Mapping[str, Any], demand: Demand) -> bool:
    in_time = demand.ttft is None or 1e3 * row["ttft_seconds"] <= demand.ttft
    return in_time and (demand.speed is None or row["speed"] >= demand.speed)


def _what_helps(demand: Demand, alone: Mapping[str, Any]) -> str:
    late = demand.ttft is not None and 1e3 * alone["ttft_seconds"] > demand.ttft
    limit = "--ttft" if late else "--speed"
    return f"{'raise' if late else 'lower'} {limit}, or take more ranks, fewer bytes (--fp8) or a shorter context"
