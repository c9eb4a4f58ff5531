"""Tokens a second of the modes of a model that stores its keys by causal rows, at a fixed number of requests at once:
each mode alone, and the engine's choice under a block budget between drafts and single tokens.

A request follows as soon as another ends, so that all rows are in use all the time.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.measuring import interleaved
from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.methods import METHODS
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequence import pages_needed
from mbd_core.models.decoder import Decoder
from mbd_core.models.shapes import SHAPES, random_model
from mbd_core.ops.attention.whole import DenseAttention

FIXED = ("ar", "linear-spec", "dlm")
TRAINED_SIZES: dict[str, Any] = {  # so large that positions cost more than the host's work for a row
    "block_size": 16,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
}
PROMPT = 16  # tokens of a prompt, drawn at random

COLUMNS = {
    "rows": "at once",
    "mode": "mode",
    "tpf": "TPF|.2f",
    "positions_per_token": "positions / token|.2f",
    "step_seconds": "step (ms)|.2f",
    "tps": "tok/s|.0f",
    "cpu_tps": "tok / CPU s|.0f",
    "over_best_fixed": "/ best fixed|.2f",
    "cpu_over_best_fixed": "/ best fixed, CPU|.2f",
    "slowest_over_fastest": "slowest / fastest run, CPU|.2f",
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A method, with the block budget of its engine. `fresh`: every run has a new one, which has learned nothing."""

    method: str
    budget: int | None = None
    fresh: bool = False

    @property
    def name(self) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        return self.method + budget + (", fresh" if self.fresh else "")


@dataclass(frozen=True, kw_only=True)
class ModeRun:
    """What one run gave out while all rows were in use.

    cpu_seconds  of this process: on a CPU, what the run would take if no other process ran
    steps        forwards of the model, `forwards` times the sequences in each
    positions    that went through the model, prompts included
    """

    seconds: float
    cpu_seconds: float
    tokens: int
    steps: int
    forwards: int
    positions: int

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_tps(self) -> float:
        return self.tokens / self.cpu_seconds


def trained_here(*, num_updates: int, device: torch.device) -> Decoder:
    """A small model, trained for a moment to draft what it would say: a text repeats its last 8 tokens, each changed
    by one permutation. It learns the next token of a causal row, and the masks of a block behind it."""
    config = replace(SHAPES["tiny-nemotron"], **TRAINED_SIZES)
    model, size, length = random_model(config, device=device, dtype=torch.float32), config.block_size, 56
    period = 8
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(0)
    permutation = torch.randperm(250, generator=generator)
    for _ in range(num_updates):
        parts = [torch.randint(250, (16, period), generator=generator)]
        while period * len(parts) < length:
            parts.append(permutation[parts[-1]])
        text = torch.cat(parts, dim=1)
        start = int(torch.randint(period, length - size, (), generator=generator))
        block, masked = text[:, start : start + size].clone(), slice(length + 1, length + size)
        block[:, 1:] = config.mask_token_id
        visible = torch.ones(length + size, length + size, dtype=torch.bool).tril()
        visible[length:, start:length], visible[length:, length:] = False, True
        positions = torch.cat((torch.arange(length), torch.arange(start, start + size)))[None].expand(16, -1)
        hidden = model(
            torch.cat((text, block), dim=1).to(device),
            positions.to(device),
            DenseAttention(visible[None, None].to(device)),
        )
        logits = model.logits(hidden)
        wanted = torch.cat((text[:, period:], text[:, start + 1 : start + size]), dim=1).to(device)
        given = torch.cat((logits[:, period - 1 : length - 1], logits[:, masked]), dim=1)
        loss = F.cross_entropy(given.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def load_causal(name: str, *, device: torch.device) -> Decoder:
    """The model of a folder, which needs no tokenizer here, or random weights of a shape; `ValueError` for one that
    stores its keys otherwise."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    is_shape = name in SHAPES
    model = random_model(SHAPES[name], device=device, dtype=dtype) if is_shape else load_model(Path(name))
    if model.config.attention != "causal":
        raise ValueError(f"{name} is a {model.config.architecture}, which does not store its keys by causal rows")
    return model.to(device=device, dtype=dtype)


def random_requests(model: Decoder, mode: Mode, *, max_tokens: int, number: int) -> list[Request]:
    """Requests with prompts of random tokens, which ignore EOS."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (number, PROMPT), generator=generator).tolist()
    decoding = decoding_config({}, METHODS[mode.method], block_size=model.config.block_size)
    return [
        Request(request_id=str(n), prompt=tuple(p), max_tokens=max_tokens, decoding=decoding, ignore_eos=True)
        for n, p in enumerate(prompts)
    ]


def engine_of(model: Decoder, requests: Sequence[Request], mode: Mode, *, rows: int) -> Engine:
    """An engine of `rows` rows without a prefix cache, so that a repetition finds no pages."""
    block_size = model.config.block_size
    page_size = EngineConfig().resolve_page_size(block_size)
    pages = max(pages_needed(r, block_size=block_size, page_size=page_size) for r in requests)
    config = EngineConfig(
        max_rows=rows, block_budget=mode.budget, num_pages=1 + rows * pages, prefix_caching=False, static_shapes=False
    )
    return Engine(model, config)


def run_mode(engine: Engine, requests: Sequence[Request], *, answers: int) -> ModeRun:
    """Keep all rows busy, and measure for `answers` answers when each row has given one on average."""
    rows, counts, num_answers, steps, positions = engine.config.max_rows, engine.counts, 0, 0, 0
    stream = (replace(r, request_id=str(n)) for n, r in enumerate(itertools.cycle(requests)))
    for request in itertools.islice(stream, rows):
        engine.add(request)

    def serve(until: int) -> None:
        nonlocal num_answers, steps, positions
        while num_answers < until:
            outputs = engine.step()
            batch = engine.runner.last_batch
            assert batch is not None
            steps, positions = steps + 1, positions + len(batch.input_ids_T)
            for output in outputs:
                if output.output is not None:
                    num_answers += 1
                    engine.add(next(stream))

    with engine.pacer.without_streams():  # so the same steps store the same prompts, whatever the machine's speed
        serve(rows)
        steps = positions = 0
        tokens, forwards = counts.committed_tokens, counts.sequence_forwards
        start, cpu_start = time.perf_counter(), time.process_time()
        serve(num_answers + answers)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    run = ModeRun(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        tokens=counts.committed_tokens - tokens,
        steps=steps,
        forwards=counts.sequence_forwards - forwards,
        positions=positions,
    )
    engine.abort_all()
    return run


def measure_modes(
    model: Decoder,
    modes: Sequence[Mode],
    *,
    rows: int,
    answers: int,
    max_tokens: int,
    repeats: int,
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """One row for each mode at `rows` requests at once; the runs take turns, and of `repeats` the median counts: where
    an engine chooses, the fastest is chance. Such an engine has served a run before, unless it is to be fresh."""
    requests = {mode: random_requests(model, mode, max_tokens=max_tokens, number=4 * rows) for mode in modes}
    engine_for = {mode: partial(engine_of, model, requests[mode], mode, rows=rows) for mode in modes}
    engines = {mode: engine_for[mode]() for mode in modes if not mode.fresh}
    for mode, engine in engines.items():
        if mode.budget is not None:
            run_mode(engine, requests[mode], answers=answers)
    runs: dict[Mode, list[ModeRun]] = {mode: [] for mode in modes}

    def tps_of(mode: Mode) -> float:
        engine = engine_for[mode]() if mode.fresh else engines[mode]
        runs[mode].append(run_mode(engine, requests[mode], answers=answers))
        return runs[mode][-1].tps

    interleaved({mode.name: partial(tps_of, mode) for mode in modes}, repeats=repeats, after=tick)
    ordered = {mode: sorted(all_runs, key=lambda run: run.cpu_tps) for mode, all_runs in runs.items()}
    median = {mode: all_runs[len(all_runs) // 2] for mode, all_runs in ordered.items()}
    fixed = [run for mode, run in median.items() if mode.budget is None]
    best, cpu_best = max(run.tps for run in fixed), max(run.cpu_tps for run in fixed)
    return [
        {
            "rows": rows,
            "mode": mode.name,
            "budget": mode.budget,
            "fresh": mode.fresh,
            "tpf": run.tokens / run.forwards,
            "positions_per_token": run.positions / run.tokens,
            "step_seconds": run.seconds / run.steps,
            "tps": run.tps,
            "cpu_tps": run.cpu_tps,
            "over_best_fixed": run.tps / best,
            "cpu_over_best_fixed": run.cpu_tps / cpu_best,
            "slowest_over_fastest": ordered[mode][0].cpu_tps / ordered[mode][-1].cpu_tps,
        }
        for mode, run in median.items()
    ]
