"""The time of a full engine's decode step: the whole step, its host work, and the bare forward on the same batch.

The engine is filled without computing prefixes: its sequences are admitted as usual, their prefix pages get random
keys and count as stored. Then it decodes. No confidence exceeds tau_m2t = 1, so every block accepts one token a step,
blocks begin at equal distances, and all slots are always resident.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring import run_seconds
from benchmarks.roofline import counted_experts
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.collector import record_step
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.schedule.scheduler import PrefillChunk
from mbd_core.engine.step.batch import Batch
from mbd_core.engine.step.graphs import capture
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.engine.step_ahead import StepPlan
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.ops.machine import best_seconds
from mbd_core.trace.recorder import TraceRecorder

_MOST_COUNTS = 4  # batches whose experts are counted
WARM_UP = 2  # steps that caches and allocators need


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """The size of a measured step: `rows` sequences of `buffer_size` slots after `prefix` stored tokens.

    steps      measured steps, of which the median is reported
    static     send every slot through the model, resident or not; `None`: the engine decides
    attention  the kernel by name; `None`: the engine decides
    trace      measure a trace recorder too
    graphs     replay static steps as CUDA graphs on a GPU; `None`: the engine decides
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
        """`max_tokens` of every sequence: more than it can decode in all steps."""
        return self.buffer_size * (3 * (self.steps + WARM_UP + 1) + 2 * block_size)

    def num_pages(self, block_size: int, page_size: int) -> int:
        """Pages for all sequences at full length, and the null page."""
        return 1 + self.rows * -(-(self.prefix + self.num_tokens(block_size) + block_size) // page_size)

    def kv_bytes(self, config: ModelConfig, dtype: torch.dtype) -> int:
        """The memory of the pages, in bytes."""
        page_size = EngineConfig().resolve_page_size(config.block_size)
        token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        return self.num_pages(config.block_size, page_size) * page_size * token


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Medians in seconds, and the mean sizes of the batches.

    step      `Engine.step()`: schedule, device part, collect
    forward   `runner.forward` and `logits` on the same batches; on a GPU with the attention's layout
    layout    binding the attention to the layout, once for all layers
    recorder  the time that a trace recorder adds to a step, with its share of the table; `None` if not measured
    num_tokens, num_logits  packed tokens and positions with logits of a batch
    touched   experts that a layer's tokens used, counted in forwards of the same batches; `None` without experts
    """

    step: float
    forward: float
    layout: float
    recorder: float | None
    num_tokens: float
    num_logits: float
    backend: str
    touched: float | None = None


def filled_engine(model: Decoder, case: StepCase, *, seed: int = 0) -> Engine:
    """An engine in which every row decodes after `case.prefix` stored tokens.

    Raises `ValueError` for a prefix that is no multiple of the block size, and the engine's own errors.
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
        engine.scheduler.publish_chunks([PrefillChunk(sequence, 0, sequence.prefix_length)])
    assert len(engine.scheduler.running) == case.rows, "the pool was made for all of them"
    return engine


def measure_step(engine: Engine, case: StepCase, *, tick: Callable[[], object] = lambda: None) -> StepTimes:
    """Time a filled engine's steps, and its forward alone on the same batches.

    A repeated forward changes nothing: it writes the same keys to the same pages. On a CPU steps and forwards take
    turns, so that a slow period of the machine slows both alike. On a GPU all steps are timed first, because the
    engine launches a step before it reads the previous one. If the engine replays steps as CUDA graphs, the forward is
    captured as a graph too.
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
        timing.seconds["step"] = [run_seconds(engine.step) for _ in range(WARM_UP + case.steps)]
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
    """The parts of a step, each timed by itself on the batch of the last step."""

    def __init__(self, engine: Engine, recorder: TraceRecorder | None) -> None:
        self._engine, self._runner, self._recorder = engine, engine.runner, recorder
        self._graphs: dict[int, Callable[[], object]] = {}  # by the id of the batch, which each captured step has
        self._sizes: list[tuple[int, int]] = []
        self._expert_counts: list[float] = []
        self.seconds: dict[str, list[float]] = {"step": [], "forward": [], "layout": [], "recorder": []}

    def time_parts(self, plan: StepPlan, *, wait: bool) -> None:
        """Time the forward, its layout and the recorder for `plan`, the last step that ran."""
        batch = self._batch
        self._sizes.append((len(batch.input_ids_T), batch.num_logits))
        device = self._engine.buffer.tokens_RNB.device
        self.seconds["forward"].append(run_seconds(self._forward_as_in_steps(), wait=device if wait else None))
        calls = 16 if wait else 1  # of microseconds: the device's own clock times several
        self.seconds["layout"].append(best_seconds(lambda: self._runner.bind(batch), device, 1, calls=calls))
        if self._recorder is not None:
            report = self._engine.last_report
            record = partial(record_step, self._recorder, plan.number, plan.decoding, report)
            self.seconds["recorder"].append(run_seconds(record))
            self._forward()  # so that every step follows a forward and finds the same CPU caches
        self._count_experts()

    def medians(self) -> StepTimes:
        median = {name: statistics.median(values[WARM_UP:]) for name, values in self.seconds.items() if values}
        recorder = None
        if self._recorder is not None:
            self._recorder.table()  # the first call loads code
            recorder = median["recorder"] + run_seconds(self._recorder.table) / len(self._sizes)
        return StepTimes(
            step=median["step"],
            forward=median["forward"],
            layout=median["layout"],
            recorder=recorder,
            num_tokens=statistics.fmean(tokens for tokens, _ in self._sizes[WARM_UP:]),
            num_logits=statistics.fmean(logits for _, logits in self._sizes[WARM_UP:]),
            backend=self._engine.attention.name,
            touched=statistics.fmean(self._expert_counts) if self._expert_counts else None,
        )

    @property
    def _batch(self) -> Batch:
        batch = self._runner.last_batch
        assert batch is not None, "a step runs a forward"
        return batch

    def _count_experts(self) -> None:
        """Count the experts of the last step's batch, in one more forward. Only a few batches are counted: they differ
        little."""
        if self._runner.model.config.moe is None or len(self._expert_counts) == _MOST_COUNTS:
            return
        with counted_experts(self._runner.model) as mean:
            self._forward()
            count = mean()
        assert count is not None
        self._expert_counts.append(count)

    def _forward(self) -> None:
        self._runner.logits(self._runner.forward(self._batch))

    def _forward_as_in_steps(self) -> Callable[[], object]:
        """The bare forward, captured as a graph if the engine replays its steps as graphs."""
        if not self._engine.graphs:
            return self._forward
        key = id(self._batch)
        if key not in self._graphs:
            graph, _ = capture(self._forward, device=self._engine.buffer.tokens_RNB.device, warm_up=1)
            self._graphs[key] = graph.replay
        return self._graphs[key]


def measure_host(engine: Engine, case: StepCase) -> float:
    """The median seconds of a step's work on the host alone: collecting it and scheduling the next step.

    The steps run without a forward: on a CPU the forward would evict the host's data from the processor's caches,
    which it does not on a GPU. From then on the engine's tokens are meaningless.
    """
    engine.land()
    plan, seconds = engine.schedule(), []
    with without_forward(engine.runner):
        for _ in range(WARM_UP + case.steps):
            plan, _, host = _step_apart(engine, plan)
            seconds.append(host)
    return statistics.median(seconds[WARM_UP:])


def _step_apart(engine: Engine, plan: StepPlan) -> tuple[StepPlan, float, float]:
    """Run a scheduled step and schedule the next one. Returns the next plan, the seconds of all this, and the seconds
    after the device's part."""
    start = time.perf_counter()
    step = engine.launch(plan)
    if engine.buffer.tokens_RNB.is_cuda:
        torch.cuda.synchronize(engine.buffer.tokens_RNB.device)
    device_end = time.perf_counter()
    engine.collect(step)
    next_plan = engine.schedule()
    end = time.perf_counter()
    return next_plan, end - start, end - device_end


@contextmanager
def without_forward(runner: ModelRunner) -> Iterator[None]:
    """Replace the forward and the logits of a runner by constant tensors."""
    forward, logits = runner.forward, runner.logits
    assert runner.last_batch is not None
    some_AD = forward(runner.last_batch)[:1]
    some_AV = logits(some_AD)

    def no_forward(batch: Batch) -> Tensor:
        return some_AD.expand(batch.num_logits, -1)

    def no_logits(hidden_AD: Tensor, *, split: Sequence[int] | None = None) -> Tensor:
        return some_AV.expand(len(hidden_AD), -1)

    runner.forward, runner.logits = no_forward, no_logits  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.forward, runner.logits  # the class's methods again
