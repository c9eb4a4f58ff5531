"""Tokens a second of the modes of a model that stores its keys by causal rows, at a fixed number of requests at once:
each mode alone, and the engine's choice under a block budget between drafts and single tokens.

A request follows as soon as another ends, so that all rows are in use all the time.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.methods import METHODS
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.sequences.sequence import pages_needed
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

SLICE = 0.1  # seconds that a mode runs before the next one's turn

COLUMNS = {
    "rows": "at once",
    "mode": "mode",
    "tpf": "TPF|.2f",
    "positions_per_token": "positions / token|.2f",
    "step_seconds": "step (ms)|.2f",
    "tps": "tok/s|.0f",
    "over_best_fixed": "/ best fixed|.3f",
    "least": "least|.3f",
    "most": "most|.3f",
}


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A method, with the block budget of its engine. `fresh`: every round has a new engine, which has learned
    nothing."""

    method: str
    budget: int | None = None
    fresh: bool = False

    @property
    def name(self) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        return self.method + budget + (", fresh" if self.fresh else "")


@dataclass(kw_only=True)
class ModeRun:
    """The tokens, steps and time of one mode in a round.

    steps      forwards of the model
    forwards   forwards of sequences: a step with n sequences counts n
    positions  positions that went through the model, prompts included
    """

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    forwards: int = 0
    positions: int = 0
    answers: int = 0

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds


def trained_here(*, num_updates: int, device: torch.device) -> Decoder:
    """A small model, trained for a moment to draft its own next tokens.

    A text repeats its last 8 tokens, each changed by one permutation. The model learns the next token of a causal row,
    and the masks of a block after it.
    """
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
    """The model of a folder, which needs no tokenizer here, or random weights of a shape.

    Raises `ValueError` for a model that stores its keys otherwise.
    """
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


def clock_of(model: Decoder) -> Callable[[], float]:
    """The clock to measure a model with: on a CPU this process's own CPU seconds, which other processes do not change.

    On a GPU it is wall-clock time.
    """
    return time.process_time if next(model.parameters()).device.type == "cpu" else time.perf_counter


def engine_of(model: Decoder, requests: Sequence[Request], mode: Mode, *, rows: int) -> Engine:
    """An engine of `rows` rows without a prefix cache, so that a repetition finds no pages."""
    block_size = model.config.block_size
    page_size = EngineConfig().resolve_page_size(block_size)
    pages = max(pages_needed(r, block_size=block_size, page_size=page_size) for r in requests)
    config = EngineConfig(
        max_rows=rows, block_budget=mode.budget, num_pages=1 + rows * pages, prefix_caching=False, static_shapes=False
    )
    return Engine(model, config, clock=clock_of(model))


class BusyEngine:
    """Keeps all rows of an engine busy with the same requests again and again, and counts.

    The first requests are cut to different lengths. Otherwise rows would end and begin together, which makes a mode
    faster if it keeps them together.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], *, clock: Callable[[], float]) -> None:
        self.engine, self._clock = engine, clock
        self._stream = (replace(r, request_id=str(n)) for n, r in enumerate(itertools.cycle(requests)))
        rows = engine.config.max_rows
        for n, request in enumerate(itertools.islice(self._stream, rows), start=1):
            engine.add(replace(request, max_tokens=-(-request.max_tokens * n // rows)))
        self.run = ModeRun()

    def serve(self, until: Callable[[ModeRun], bool]) -> None:
        """Go on step by step until `until` holds."""
        engine, run, counts = self.engine, self.run, self.engine.counts
        tokens, forwards, start = counts.committed_tokens, counts.sequence_forwards, self._clock()
        before = run.seconds
        with engine.pacer.without_streams():  # steps store the same prompts at any speed of the machine
            while not until(run):
                outputs = engine.step()
                batch = engine.runner.last_batch
                assert batch is not None
                run.steps, run.positions = run.steps + 1, run.positions + len(batch.input_ids_T)
                for _ in (o for o in outputs if o.output is not None):
                    run.answers += 1
                    engine.add(next(self._stream))
                run.seconds = before + self._clock() - start
        run.tokens += counts.committed_tokens - tokens
        run.forwards += counts.sequence_forwards - forwards


def run_round(busy: Mapping[Mode, BusyEngine], *, answers: int) -> dict[Mode, ModeRun]:
    """Serve all modes side by side, a slice of each in turn, until each has given `answers` answers: a slow moment of
    the machine slows all alike. Measuring begins when each row has given one answer on average."""
    unfinished = list(busy.values())
    for engine in unfinished:
        engine.serve(until_answers(engine.engine.config.max_rows))
        engine.run = ModeRun()
    while unfinished:
        for engine in unfinished:
            engine.serve(until_answers(answers, seconds=engine.run.seconds + SLICE))
        unfinished = [engine for engine in unfinished if engine.run.answers < answers]
    for engine in busy.values():
        engine.engine.abort_all()
    return {mode: engine.run for mode, engine in busy.items()}


def until_answers(number: int, *, seconds: float = math.inf) -> Callable[[ModeRun], bool]:
    """Whether a run has given `number` answers, or taken `seconds`."""
    return lambda run: run.answers >= number or run.seconds >= seconds


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
    """One row for each mode at `rows` requests at once: the median of `repeats` rounds, and the least and the largest
    ratio to the best fixed mode. An engine that chooses serves an unmeasured round first, unless its mode is fresh."""
    requests = {mode: random_requests(model, mode, max_tokens=max_tokens, number=4 * rows) for mode in modes}
    engine_for = {mode: partial(engine_of, model, requests[mode], mode, rows=rows) for mode in modes}
    engines = {mode: engine_for[mode]() for mode in modes if not mode.fresh}

    def served(chosen: Sequence[Mode]) -> dict[Mode, ModeRun]:
        clock = clock_of(model)
        used = {mode: engine_for[mode]() if mode.fresh else engines[mode] for mode in chosen}
        return run_round({m: BusyEngine(e, requests[m], clock=clock) for m, e in used.items()}, answers=answers)

    served([mode for mode in modes if not mode.fresh and mode.budget is not None])
    rounds = list[dict[Mode, ModeRun]]()
    for turn in range(repeats):  # each round begins with another mode
        first = turn % len(modes)
        rounds.append(served([*modes[first:], *modes[:first]]))
        tick()
    median = {mode: statistics.median(runs[mode].tps for runs in rounds) for mode in modes}
    best = max((mode for mode in modes if mode.budget is None), key=lambda mode: median[mode])
    table = list[dict[str, Any]]()
    for mode in modes:
        ratios = [runs[mode].tps / runs[best].tps for runs in rounds]
        total = {
            f: sum(getattr(runs[mode], f) for runs in rounds) for f in ("tokens", "steps", "forwards", "positions")
        }
        table.append(
            {
                "rows": rows,
                "mode": mode.name,
                "budget": mode.budget,
                "fresh": mode.fresh,
                "tpf": total["tokens"] / total["forwards"],
                "positions_per_token": total["positions"] / total["tokens"],
                "step_seconds": sum(runs[mode].seconds for runs in rounds) / total["steps"],
                "tps": median[mode],
                "over_best_fixed": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return table
