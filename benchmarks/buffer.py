"""Tokens a second of buffer sizes and block budgets at a fixed number of requests at once, and by a roofline.

A request follows as soon as another ends, so that all rows are in use all the time: the load is constant, and a budget
leaves every sequence equally many blocks.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.measuring import interleaved
from benchmarks.roofline import Machine, floor_seconds, step_cost
from mbd_core.checkpoint.chat import chat_prompts, question
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.sequence import pages_needed
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.tasks import gsm_mini

RANDOM_PROMPT = 64  # tokens of a prompt for random weights

COLUMNS = {
    "rows": "at once",
    "buffer": "N_buf",
    "blocks_each": "blocks each",
    "resident_blocks": "resident|.2f",
    "tpf": "TPF|.2f",
    "step_seconds": "step (ms)|.2f",
    "tps": "tok/s|.0f",
    "cpu_tps": "tok / CPU s|.0f",
    "over_best_fixed": "/ best fixed|.2f",
}


@dataclass(frozen=True, kw_only=True)
class BufferCase:
    """A compared setting: a buffer size, with or without a block budget."""

    size: int
    budget: int | None = None

    @property
    def name(self) -> str:
        return f"{self.size}" if self.budget is None else f"budget {self.budget}"


@dataclass(frozen=True, kw_only=True)
class BufferRun:
    """The results of one run while all rows were in use.

    cpu_seconds  CPU seconds of this process, which other processes do not change
    forwards     forwards of sequences: a decode step with n sequences counts n
    blocks       resident blocks of a sequence in a forward, on average
    """

    seconds: float
    cpu_seconds: float
    tokens: int
    forwards: int
    blocks: float

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds

    @property
    def tpf(self) -> float:
        return self.tokens / self.forwards


def load_model_and_requests(
    name: str, *, max_tokens: int, device: torch.device, number: int
) -> tuple[Decoder, list[Request]]:
    """A model and `number` requests for it.

    A shipped model or a folder gets problems. A shape gets random weights and random prompts, and its requests ignore
    EOS. Raises `ValueError` for another name.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name in SHAPES:
        config = SHAPES[name]
        model = random_model(config, device=device, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(config.vocab_size, (number, RANDOM_PROMPT), generator=generator).tolist()
        defaults: dict[str, Any] = {}
    else:
        folder = model_folder(name)
        contents = read_folder(folder)
        model = load_model(folder, dtype=dtype, device=device)
        config, defaults = load_config(folder), contents.defaults
        problems = itertools.islice(gsm_mini.generate(split="test", seed=0), number)
        prompts = chat_prompts(contents.tokenizer, [question(problem["question"]) for problem in problems])
    decoding = decoding_config(defaults, {}, block_size=config.block_size)
    requests = [
        Request(
            request_id=str(n),
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            decoding=decoding,
            ignore_eos=name in SHAPES,
        )
        for n, prompt in enumerate(prompts)
    ]
    return model, requests


def engine_for(
    model: Decoder, requests: Sequence[Request], buffer: BufferCase, *, rows: int, static: bool | None
) -> tuple[Engine, list[Request]]:
    """An engine of `rows` rows without a prefix cache, so that a repetition finds no pages, and its requests."""
    block_size = model.config.block_size
    page_size = EngineConfig().resolve_page_size(block_size)
    requests = [replace(r, decoding=replace(r.decoding, buffer_size=buffer.size)) for r in requests]
    pages = max(pages_needed(r, block_size=block_size, page_size=page_size) for r in requests)
    config = EngineConfig(
        max_rows=rows,
        buffer_size=buffer.size,
        block_budget=buffer.budget,
        num_pages=1 + rows * pages,
        prefix_caching=False,
        static_shapes=static,
    )
    engine = Engine(model, config)
    engine.prepare(requests[0].decoding)
    return engine, requests


def run_at_load(engine: Engine, requests: Sequence[Request], *, answers: int) -> BufferRun:
    """Keep all rows busy. After one answer per row on average, measure until `answers` more have come."""
    rows, counts, num_answers = engine.config.max_rows, engine.counts, 0
    stream = (replace(r, request_id=str(n)) for n, r in enumerate(itertools.cycle(requests)))
    for request in itertools.islice(stream, rows):
        engine.add(request)

    def serve(until: int) -> None:
        nonlocal num_answers
        while num_answers < until:
            for output in engine.step():
                if output.output is not None:
                    num_answers += 1
                    engine.add(next(stream))

    with engine.pacer.without_streams():  # steps store the same prompts at any speed of the machine
        serve(rows)
        counts.block_lifetimes.take()
        tokens, forwards = counts.committed_tokens, counts.sequence_forwards
        start, cpu_start = time.perf_counter(), time.process_time()
        serve(num_answers + answers)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    tokens, forwards = counts.committed_tokens - tokens, counts.sequence_forwards - forwards
    blocks = sum(counts.block_lifetimes.take()) / forwards
    for sequence in [*engine.scheduler.running.values(), *engine.scheduler.waiting]:
        engine.abort(sequence.request.request_id)
    while engine.has_work:
        engine.step()
    return BufferRun(seconds=seconds, cpu_seconds=cpu_seconds, tokens=tokens, forwards=forwards, blocks=blocks)


def measure_load(
    model: Decoder,
    requests: Sequence[Request],
    buffers: Sequence[BufferCase],
    *,
    rows: int,
    answers: int,
    repeats: int,
    static: bool | None,
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """One row for each buffer at `rows` requests at once; the runs take turns, and of `repeats` the fastest counts."""
    engines = {buffer: engine_for(model, requests, buffer, rows=rows, static=static) for buffer in buffers}
    runs: dict[BufferCase, list[BufferRun]] = {buffer: [] for buffer in buffers}

    def measure(buffer: BufferCase) -> float:
        runs[buffer].append(run_at_load(*engines[buffer], answers=answers))
        return runs[buffer][-1].tps

    interleaved({b.name: partial(measure, b) for b in buffers}, repeats=repeats, after=tick)
    fastest = {buffer: max(runs_of_buffer, key=lambda run: run.tps) for buffer, runs_of_buffer in runs.items()}
    best = max(run.tps for buffer, run in fastest.items() if buffer.budget is None)
    return [
        {
            "rows": rows,
            "buffer": buffer.name,
            "buffer_size": buffer.size,
            "block_budget": buffer.budget,
            "blocks_each": engines[buffer][0].config.blocks_each(rows),
            "resident_blocks": run.blocks,
            "tpf": run.tpf,
            "step_seconds": rows * run.seconds / run.forwards,
            "tps": run.tps,
            "cpu_tps": run.tokens / run.cpu_seconds,
            "over_best_fixed": run.tps / best,
        }
        for buffer, run in fastest.items()
    ]


def predict_load(
    config: ModelConfig, machine: Machine, tpf: Mapping[int, float], *, rows: Sequence[int], prefix: int
) -> list[dict[str, Any]]:
    """Computed, not measured: the tokens a second of static steps at their floor, for each number of rows.

    `tpf` holds the tokens per forward by buffer size. `best` is the size with the most tokens a second, and
    `budget` the blocks that all rows have with it.
    """
    table = []
    for number in rows:
        tps = {
            size: number
            * tokens
            / floor_seconds(step_cost(config, rows=number, buffer_size=size, prefix=prefix), machine)
            for size, tokens in tpf.items()
        }
        best = max(tps, key=lambda size: tps[size])
        table.append(
            {"rows": number, "best": best, "budget": best * number, **{f"tps_{n}": v for n, v in tps.items()}}
        )
    return table
