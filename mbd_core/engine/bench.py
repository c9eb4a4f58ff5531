"""One decode step of a full engine, timed: whole, its bare forward on the identical batch, and with a trace recorder.

The engine is filled without computing prefixes: its sequences are admitted as usual, their prefix pages hold random
keys and count as stored. Then it decodes. No confidence exceeds tau_m2t = 1, so every block takes one token a step,
blocks begin evenly apart, and all slots are resident all the time.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mbd_core.decoding.config import DecodingConfig
from mbd_core.engine.batch import Batch
from mbd_core.engine.engine import Engine, EngineConfig
from mbd_core.engine.runner import EagerRunner
from mbd_core.engine.scheduler import PrefillChunk
from mbd_core.models.config import ModelConfig
from mbd_core.models.decoder import Decoder
from mbd_core.trace import TraceRecorder
from mbd_core.types import Request

WARM_UP = 2  # steps that caches and allocators need


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """What a step is measured at: `rows` sequences of `buffer_size` slots behind `prefix` stored tokens.

    steps      measured steps; the median counts
    static     send every slot through the model, used or not; `None`: as the engine does by itself
    attention  the kernel by name; by default the best there is
    trace      measure the steps with a trace recorder too
    """

    rows: int
    buffer_size: int
    prefix: int
    steps: int = 20
    static: bool | None = None
    attention: str | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "buffer_size", "prefix", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def num_tokens(self, block_size: int) -> int:
        """Tokens that every sequence may decode: more than it can in all the steps."""
        return self.buffer_size * (2 * (self.steps + 3) + 2 * block_size)

    def num_pages(self, block_size: int, page_size: int) -> int:
        """Pages that hold all sequences to their ends, and the null page."""
        return 1 + self.rows * -(-(self.prefix + self.num_tokens(block_size) + block_size) // page_size)

    def kv_bytes(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """Memory of the pages."""
        page_size = EngineConfig().resolve_page_size(config.block_size)
        token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        return self.num_pages(config.block_size, page_size) * page_size * token


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Medians in seconds, and what the batches held.

    step      `Engine.step()`: scheduling, layout, forward, acceptance, slot states, copy to the host, outputs
    forward   `runner.forward` and `logits` on the same batches: the attention's layout, the model, the logits
    layout    of `forward`, what lays the attention out for all layers
    traced    `step` with a trace recorder; `None` unless asked for
    recorder  of `traced`, what recording takes, and of the table that its rows become a step's part; `None` as before
    num_tokens, num_logits  packed tokens and positions with logits of a batch
    """

    step: float
    forward: float
    layout: float
    traced: float | None
    recorder: float | None
    num_tokens: float
    num_logits: float
    backend: str


class _Tap:
    """Remembers the batches that a runner runs, whoever asks it to.

    Of a captured step that is the batch it was captured with, whose tensors every replay fills anew.
    """

    def __init__(self, runner: EagerRunner) -> None:
        self.batch: Batch = None  # type: ignore[assignment]
        self._runner, self.forward = runner, runner.forward
        runner.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, batch: Batch) -> Tensor:
        self.batch = batch
        return self.forward(batch)

    def bare(self, batch: Batch) -> Tensor:
        """The forward and its logits."""
        return self._runner.logits(self.forward(batch))


def filled_engine(model: Decoder, case: StepCase, *, seed: int = 0) -> Engine:
    """An engine whose every row decodes behind `case.prefix` stored tokens, all slots resident.

    Raises `ValueError` for a prefix that is no multiple of the block size and for what the engine refuses.
    """
    config = model.config
    size = config.block_size
    if case.prefix % size:
        raise ValueError(f"prefix={case.prefix} is not a multiple of the model's block_size={size}")
    page_size = EngineConfig().resolve_page_size(size)
    engine = Engine(
        model,
        EngineConfig(
            max_rows=case.rows,
            buffer_size=case.buffer_size,
            num_pages=case.num_pages(size, page_size),
            static_shapes=case.static,
            attention=case.attention,
        ),
    )
    decoding = DecodingConfig(
        block_size=size,
        buffer_size=case.buffer_size,
        tau_add=0.5 / case.buffer_size,
        tau_semi=0.0,
        tau_m2t=1.0,
    )
    generator = torch.Generator().manual_seed(seed)
    for row in range(case.rows):
        prompt = torch.randint(config.vocab_size, (case.prefix,), generator=generator).tolist()
        engine.add(
            Request(
                request_id=str(row),
                prompt=tuple(prompt),
                max_tokens=case.num_tokens(size),
                decoding=decoding,
                ignore_eos=True,
            )
        )
    cache = engine.runner.cache
    cache.k.normal_()
    cache.v.normal_()
    for sequence in engine.scheduler.admit():
        sequence.prefilled_to(sequence.prefix_length)
        engine.scheduler.stored([PrefillChunk(sequence, 0, sequence.prefix_length)])
    assert len(engine.scheduler.running) == case.rows, "the pool was made for all of them"
    return engine


def measure_step(engine: Engine, case: StepCase, *, tick: Callable[[], object] = lambda: None) -> StepTimes:
    """Time a filled engine's steps, and its forward alone on the same batches.

    Running the forward again changes nothing: it stores the same keys where they are. On a CPU steps, forwards and,
    with `case.trace`, traced steps take turns, so that a slow spell of the machine meets all of them alike. On a GPU
    they come one kind after another, for a step is launched before the one before it is read; where the step is
    replayed as a graph its forward is one too.
    """
    device = engine.buffer.tokens_RNB.device
    tap = _Tap(engine.runner)
    for _ in range(2 * engine.block_size):
        engine.step()
        if bool(engine.buffer.resident_RN.all()):
            break
    assert bool(engine.buffer.resident_RN.all()), "every slot of every row is in use"
    assert tap.batch is not None, "a step runs a forward"
    recorder = TraceRecorder(block_size=engine.block_size) if case.trace else None

    recording: list[float] = []
    record = engine._record

    def timed_record(*args: Any) -> None:
        recording.append(_seconds(lambda: record(*args)))

    engine._record = timed_record  # type: ignore[method-assign, assignment]

    def traced() -> None:
        engine._trace = recorder
        engine.step()
        engine._trace = None

    if recorder is not None:
        traced()
        recorder.table()  # the first table loads code
        recording.clear()
    if device.type == "cuda":
        forward = _captured(lambda: tap.bare(tap.batch)) if engine.static_shapes else lambda: tap.bare(tap.batch)
        kinds: dict[str, Callable[[], object]] = {"step": engine.step}
        if recorder is not None:
            kinds["traced"] = traced
        kinds |= {"forward": forward, "layout": lambda: engine.runner.bind(tap.batch)}
        taken = {
            name: _series(run, case.steps, tick, wait=name in ("forward", "layout")) for name, run in kinds.items()
        }
        shapes = [(len(tap.batch.input_ids_T), len(tap.batch.logits_at_A))]
    else:
        taken, shapes = _by_turns(engine, tap, case, traced if case.trace else None, tick)
    engine.runner.forward = tap.forward  # type: ignore[method-assign]
    engine._record = record  # type: ignore[method-assign]
    own = None
    if recorder is not None:
        own = statistics.median(recording) + _seconds(recorder.table) / len(recording)
    return StepTimes(
        step=statistics.median(taken["step"]),
        forward=statistics.median(taken["forward"]),
        layout=statistics.median(taken["layout"]),
        traced=statistics.median(taken["traced"]) if recorder is not None else None,
        recorder=own,
        num_tokens=statistics.fmean(tokens for tokens, _ in shapes),
        num_logits=statistics.fmean(logits for _, logits in shapes),
        backend=engine.attention.name,
    )


def _by_turns(
    engine: Engine, tap: _Tap, case: StepCase, traced: Callable[[], None] | None, tick: Callable[[], object]
) -> tuple[dict[str, list[float]], list[tuple[int, int]]]:
    """Seconds of every kind of run, taken in turns after two rounds to warm up; tokens and logits of the batches.

    What is timed always follows a forward, so that neither a step nor a traced one finds emptier caches.
    """
    taken: dict[str, list[float]] = {"step": [], "forward": [], "layout": [], "traced": []}
    shapes = []
    for turn in range(case.steps + WARM_UP):
        step = _seconds(engine.step)
        batch = tap.batch
        assert batch is not None
        times = {"step": step, "forward": _seconds(lambda: tap.bare(tap.batch))}
        times["layout"] = _seconds(lambda: engine.runner.bind(tap.batch))
        if traced is not None:
            times["traced"] = _seconds(traced)
            tap.bare(tap.batch)
        tick()
        if turn >= WARM_UP:
            for name, value in times.items():
                taken[name].append(value)
            shapes.append((len(batch.input_ids_T), len(batch.logits_at_A)))
    return taken, shapes


def _series(run: Callable[[], object], steps: int, tick: Callable[[], object], *, wait: bool) -> list[float]:
    """Seconds of runs on a GPU, one after another; those that do not look at their result are waited for."""
    torch.cuda.synchronize()
    taken = []
    for turn in range(steps + WARM_UP):
        started = time.perf_counter()
        run()
        if wait:
            torch.cuda.synchronize()
        if turn >= WARM_UP:
            taken.append(time.perf_counter() - started)
            if not wait:
                tick()
    return taken


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
