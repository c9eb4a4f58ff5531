"""One decode step of a full engine, timed: whole, the host's part of it, its bare forward on the identical batch.

The engine is filled without computing prefixes: its sequences are admitted as usual, their prefix pages hold random
keys and count as stored. Then it decodes. No confidence exceeds tau_m2t = 1, so every block takes one token a step,
blocks begin evenly apart, and all slots are resident all the time.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.request import Request
from mbd_core.engine.ahead import StepPlan
from mbd_core.engine.batch import Batch
from mbd_core.engine.collector import record_step
from mbd_core.engine.engine import Engine
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.engine.graphs import capture
from mbd_core.engine.model_runner import ModelRunner
from mbd_core.engine.scheduler import PrefillChunk
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.trace.recorder import TraceRecorder

WARM_UP = 2  # steps that caches and allocators need


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """What a step is measured at: `rows` sequences of `buffer_size` slots behind `prefix` stored tokens.

    steps      measured steps; the median counts
    static     send every slot through the model, used or not; `None`: as the engine does by itself
    attention  the kernel by name; by default the best there is
    trace      measure a trace recorder too
    graphs     on a GPU, replay static steps as CUDA graphs; `None`: as the engine does by itself
    """

    rows: int
    buffer_size: int
    prefix: int
    steps: int = 20
    static: bool | None = None
    attention: str | None = None
    trace: bool = False
    graphs: bool | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "buffer_size", "prefix", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def num_tokens(self, block_size: int) -> int:
        """Tokens that every sequence may decode: more than it can in all the steps."""
        return self.buffer_size * (3 * (self.steps + WARM_UP + 1) + 2 * block_size)

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

    step      `Engine.step()`: schedule, device part, collect
    forward   `runner.forward` and `logits` on the same batches: the attention's layout, the model, the logits
    layout    of `forward`, what lays the attention out for all layers
    recorder  what a trace recorder adds to a step, its share of making the table included; `None` unless asked for
    num_tokens, num_logits  packed tokens and positions with logits of a batch
    """

    step: float
    forward: float
    layout: float
    recorder: float | None
    num_tokens: float
    num_logits: float
    backend: str


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
            graphs=case.graphs,
        ),
    )
    decoding = DecodingConfig(
        block_size=size,
        buffer_size=case.buffer_size,
        tau_add=0.5 / case.buffer_size,
        tau_semi=0.0,
        tau_m2t=1.0,
    )
    engine.prepare(decoding)
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
    for sequence in engine.admit():
        sequence.prefilled_to(sequence.prefix_length)
        engine.scheduler.stored([PrefillChunk(sequence, 0, sequence.prefix_length)])
    assert len(engine.scheduler.running) == case.rows, "the pool was made for all of them"
    return engine


def measure_step(engine: Engine, case: StepCase, *, tick: Callable[[], object] = lambda: None) -> StepTimes:
    """Time a filled engine's steps, and its forward alone on the same batches.

    Running the forward again changes nothing: it stores the same keys where they are. On a CPU steps and forwards
    take turns, so that a slow spell of the machine meets all of them alike. On a GPU they come one kind after
    another, for a step is launched before the one before it is read; where the step is replayed as a graph its forward
    is one too.
    """
    for _ in range(2 * engine.block_size):
        engine.step()
        if bool(engine.buffer.resident_RN.all()):
            break
    assert bool(engine.buffer.resident_RN.all()), "every slot of every row is in use"
    on_gpu = engine.buffer.tokens_RNB.is_cuda
    recorder = TraceRecorder(block_size=engine.block_size) if case.trace else None
    timing = _StepParts(engine, recorder)
    if on_gpu:
        timing.seconds["step"] = [_seconds(engine.step) for _ in range(WARM_UP + case.steps)]
        engine.land()
    plan = engine.schedule()
    for _ in range(WARM_UP + case.steps):
        current = plan
        plan, seconds, _ = _step_apart(engine, current)
        if not on_gpu:
            timing.seconds["step"].append(seconds)
        timing.time_parts(current, wait=on_gpu)
        tick()
    return timing.medians()


class _StepParts:
    """What a step consists of, timed apart on the batch of the last step."""

    def __init__(self, engine: Engine, recorder: TraceRecorder | None) -> None:
        self._engine, self._runner, self._recorder = engine, engine.runner, recorder
        self._graphs: dict[int, Callable[[], object]] = {}  # each captured step has a batch of its own
        self._sizes: list[tuple[int, int]] = []
        self.seconds: dict[str, list[float]] = {"step": [], "forward": [], "layout": [], "recorder": []}

    def time_parts(self, plan: StepPlan, *, wait: bool) -> None:
        """The forward, its layout and the recorder, for the step of `plan`, which has just been taken."""
        batch = self._batch
        self._sizes.append((len(batch.input_ids_T), len(batch.logits_at_A)))
        self.seconds["forward"].append(_seconds(self._forward_as_in_steps(), wait=wait))
        self.seconds["layout"].append(_seconds(lambda: self._runner.bind(batch), wait=wait))
        if self._recorder is not None:
            report = self._engine.last_report
            record = partial(record_step, self._recorder, plan.number, plan.decoding, report)
            self.seconds["recorder"].append(_seconds(record))
            self._forward()  # a step always follows a forward: none finds emptier caches

    def medians(self) -> StepTimes:
        of = {name: statistics.median(values[WARM_UP:]) for name, values in self.seconds.items() if values}
        own = None
        if self._recorder is not None:
            self._recorder.table()  # the first table loads code
            own = of["recorder"] + _seconds(self._recorder.table) / len(self._sizes)
        return StepTimes(
            step=of["step"],
            forward=of["forward"],
            layout=of["layout"],
            recorder=own,
            num_tokens=statistics.fmean(tokens for tokens, _ in self._sizes[WARM_UP:]),
            num_logits=statistics.fmean(logits for _, logits in self._sizes[WARM_UP:]),
            backend=self._engine.attention.name,
        )

    @property
    def _batch(self) -> Batch:
        batch = self._runner.last_batch
        assert batch is not None, "a step runs a forward"
        return batch

    def _forward(self) -> None:
        self._runner.logits(self._runner.forward(self._batch))

    def _forward_as_in_steps(self) -> Callable[[], object]:
        """The bare forward, as a graph where steps are graphs."""
        if not self._engine.graphs:
            return self._forward
        key = id(self._batch)
        if key not in self._graphs:
            self._graphs[key] = _captured(self._forward)
        return self._graphs[key]


def measure_host(engine: Engine, case: StepCase) -> float:
    """Seconds (a median) of what a step does on the host alone: to collect it, to schedule the next.

    In steps whose forward is left out, since on a CPU it would empty the caches that beside a GPU are the host's own.
    The tokens are no model's from then on.
    """
    engine.land()
    plan, taken = engine.schedule(), []
    with _without_forward(engine.runner):
        for _ in range(WARM_UP + case.steps):
            plan, _, host = _step_apart(engine, plan)
            taken.append(host)
    return statistics.median(taken[WARM_UP:])


def _step_apart(engine: Engine, plan: StepPlan) -> tuple[StepPlan, float, float]:
    """A scheduled step as the engine takes it, up to where the next is scheduled: that plan, the seconds of all of it,
    and of what came behind the device's part."""
    started = time.perf_counter()
    launched = engine.launch(plan)
    if engine.buffer.tokens_RNB.is_cuda:
        torch.cuda.synchronize()
    done = time.perf_counter()
    engine.collect(launched)
    following = engine.schedule()
    ended = time.perf_counter()
    return following, ended - started, ended - done


@contextmanager
def _without_forward(runner: ModelRunner) -> Iterator[None]:
    """Every forward gives the same hidden states, every position the same logits."""
    forward, logits = runner.forward, runner.logits
    assert runner.last_batch is not None
    some_AD = forward(runner.last_batch)[:1]
    some_AV = logits(some_AD)

    def no_forward(batch: Batch) -> Tensor:
        return some_AD.expand(len(batch.logits_at_A), -1)

    def no_logits(hidden_AD: Tensor, *, split: Sequence[int] | None = None) -> Tensor:
        return some_AV.expand(len(hidden_AD), -1)

    runner.forward, runner.logits = no_forward, no_logits  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner.forward, runner.logits = forward, logits  # type: ignore[method-assign]


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same as a CUDA graph."""
    graph, _ = capture(run, warm_up=1)
    return graph.replay


def _seconds(run: Callable[[], object], *, wait: bool = False) -> float:
    started = time.perf_counter()
    run()
    if wait:
        torch.cuda.synchronize()
    return time.perf_counter() - started
