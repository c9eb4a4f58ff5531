"""Steps as CUDA graphs, captured when the server starts: static steps, and forwards of planned rows.

A step of a kind that has no graph, and that no captured kind covers, runs kernel by kernel and is counted.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mbd_core.engine.config import EngineConfig
from mbd_core.engine.step.batch import Batch
from mbd_core.engine.step.decode import StepState
from mbd_core.engine.step.kinds import StepKind
from mbd_core.engine.step.planned_graphs import CapturedForward, GraphMemory, PlannedKind
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.engine.step.static_step import static_step
from mbd_core.ops.attention.choice import AttentionKernel
from mbd_core.ops.launch import triton_serves

T = TypeVar("T")


def capture(
    run: Callable[[], T],
    *,
    device: torch.device,
    restore: Callable[[], object] = lambda: None,
    pool: Any = None,
    stream: "torch.cuda.Stream | None" = None,
    warm_up: int = 2,
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures `run` on `device` as a CUDA graph. Returns the graph and the result of `run`, in memory that each
    replay overwrites.

    First `run` warms up `warm_up` times, and `restore` undoes its changes. All happens on `stream`, by default a new
    stream. Temporary memory belongs to a stream, so successive captures should share a stream.
    """
    with torch.cuda.device(device):
        stream = stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(warm_up):
                run()
                restore()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": calls of other threads to the device do not break this capture
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = run()
    return graph, result


@dataclass
class StepGraphs:
    """The captured steps of one engine. With an `obstacle` every step runs kernel by kernel.

    obstacle                 why there are no graphs
    num_replayed, num_eager  steps so far, by how they ran: static steps, and once some kind of them has a graph,
                             forwards of planned rows alone
    memory_bytes             device memory that the graphs took
    """

    state: StepState
    obstacle: str | None
    num_replayed: int = 0
    num_eager: int = 0
    memory_bytes: int = 0
    _captured_steps: "dict[StepKind, CapturedStep]" = field(default_factory=dict)
    _graph_of_kind: "dict[StepKind, CapturedStep | None]" = field(default_factory=dict)
    _captured_forwards: dict[PlannedKind, CapturedForward] = field(default_factory=dict)
    _forward_memory: GraphMemory = field(default_factory=dict)
    _pool: Any = None
    _stream: "torch.cuda.Stream | None" = None

    @property
    def enabled(self) -> bool:
        return self.obstacle is None

    def capture(self, kinds: Iterable[StepKind], forwards: Iterable[PlannedKind] = ()) -> int:
        """Captures the kinds that have no graph yet; returns the number of graphs."""
        if self.enabled:
            device = self.state.tables_RP.device
            self._graph_of_kind.clear()
            free, _ = torch.cuda.mem_get_info(device)
            # graphs share their temporary memory: one graph runs at a time, and its report is read before the next
            self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
            self._stream = self._stream or torch.cuda.Stream(device)
            # the largest first: smaller graphs then fit into the memory that the largest left in the pool
            for kind in sorted(kinds, key=_size, reverse=True):
                if kind not in self._captured_steps:
                    self._captured_steps[kind] = CapturedStep(self.state, kind, self._pool, self._stream)
            capture_forward = partial(capture, device=device, pool=self._pool, stream=self._stream)
            for planned in sorted(forwards, key=lambda planned: planned.size, reverse=True):
                if planned not in self._captured_forwards:
                    self._captured_forwards[planned] = CapturedForward(
                        self.state, planned, capture_forward, self._forward_memory
                    )
            self.memory_bytes += free - torch.cuda.mem_get_info(device)[0]
        return len(self._graphs)

    def run(self, kind: StepKind, *, num_pages: int) -> Tensor:
        """Runs one static step. Returns its report (X,), valid until the next step."""
        graph = self._graph_for(kind)
        if graph is not None:
            self.num_replayed += 1
            return graph.replay()
        self.num_eager += 1
        return static_step(self.state, kind, num_pages=num_pages)

    def forward(self, runner: ModelRunner, batch: Batch) -> Tensor:
        """The hidden states (A, D) of a forward of planned rows alone."""
        kind = PlannedKind.of(batch, by_draft_model=runner is self.state.draft_runner)
        covering = [] if kind is None else [c for c in self._captured_forwards if c.covers(kind)]
        if covering:
            self.num_replayed += 1
            return self._captured_forwards[min(covering, key=lambda planned: planned.size)].replay(batch)
        self.num_eager += bool(self._captured_forwards)
        return runner.forward(batch)

    def release(self, *, wait: bool = True) -> None:
        """Releases all graphs when the device has finished; from then on every step runs kernel by kernel. Without
        `wait` a running graph ends later.

        NCCL destroys a communicator only when no graph holds it. The next capture takes another memory pool, because
        torch refuses a pool that tensors use without a graph.
        """
        if self._graphs and wait:
            torch.cuda.synchronize(self.state.tables_RP.device)
        for graph in self._graphs:
            graph.release()
        self._captured_steps.clear()
        self._captured_forwards.clear()
        self._graph_of_kind.clear()
        self._forward_memory.clear()
        self._pool, self.memory_bytes = None, 0
        for runner in (self.state.runner, self.state.draft_runner):
            if runner is not None:
                runner.forget_batch()

    def report(self) -> dict[str, Any]:
        """Why there are no graphs; the number of graphs, their memory, and steps by how they ran."""
        return {
            "not_used": self.obstacle,
            "captured": len(self._graphs),
            "memory_bytes": self.memory_bytes,
            "steps_replayed": self.num_replayed,
            "steps_eager": self.num_eager,
        }

    @property
    def _graphs(self) -> "list[CapturedStep | CapturedForward]":
        return [*self._captured_steps.values(), *self._captured_forwards.values()]

    def _graph_for(self, kind: StepKind) -> "CapturedStep | None":
        """The graph of the least captured kind that does all that `kind` does."""
        if kind not in self._graph_of_kind:
            candidates = [candidate for candidate in self._captured_steps if candidate.covers(kind)]
            self._graph_of_kind[kind] = self._captured_steps[min(candidates, key=_size)] if candidates else None
        return self._graph_of_kind[kind]


def _size(kind: StepKind) -> tuple[int, int, bool, int, int]:
    """Orders kinds by the work of their step: batch rows, slots, positions with logits, optional work."""
    return kind.num_rows, kind.num_slots, kind.num_asked is None, kind.num_asked or 0, sum(vars(kind.work).values())


class CapturedStep:
    """A static step as a CUDA graph.

    The warm-up runs the step, so the buffer is restored afterwards. Keys and values need no restore: the real step
    overwrites them.
    """

    def __init__(self, state: StepState, kind: StepKind, pool: Any, stream: "torch.cuda.Stream") -> None:
        runner, buffer = state.runner, state.buffer
        buffer_copy, last_copy_RD = buffer.save_all(), runner.last_RD.clone()

        def restore() -> None:
            buffer.restore_all(buffer_copy)
            runner.last_RD.copy_(last_copy_RD)

        device, num_pages = state.tables_RP.device, state.tables_RP.shape[1]
        compiled = triton_serves(device, runner.cache.k.dtype)
        self._graph, report_X = capture(
            lambda: static_step(state, kind, num_pages=num_pages, compiled=compiled),
            device=device,
            restore=restore,
            pool=pool,
            stream=stream,
        )
        self._report_X, self._runner, self._batch = report_X, runner, runner.last_batch

    def replay(self) -> Tensor:
        """Runs the captured step. Returns its report, which the next replay overwrites."""
        self._graph.replay()
        self._runner.last_batch = self._batch
        return self._report_X

    def release(self) -> None:
        """Gives back the graph's memory and its communicator."""
        self._graph.reset()


def graphs_obstacle(
    config: EngineConfig, attentions: Sequence[AttentionKernel], device: torch.device, *, static_shapes: bool
) -> str | None:
    """Why steps are not captured as graphs; `None` if they are, as wherever that is possible. `attentions` are the
    model's kernel, and after it the draft model's if the engine has one.

    With `graphs=False` they never are. Raises `ValueError` if `graphs` is `True` and graphs are not possible.
    """
    obstacle = _obstacle(config, attentions, device, static_shapes=static_shapes)
    if config.graphs and obstacle is not None:
        raise ValueError(f"graphs=True cannot be honoured: {obstacle}")
    return "graphs=False was asked for" if config.graphs is False else obstacle


def _obstacle(
    config: EngineConfig, attentions: Sequence[AttentionKernel], device: torch.device, *, static_shapes: bool
) -> str | None:
    if not static_shapes:
        return "without static_shapes=True no step has a shape that repeats"
    if device.type != "cuda":
        return f"CUDA graphs need a GPU, this is {device.type}"
    if config.batch_invariant:
        return "with batch_invariant=True rows' lengths are read on the host"
    for subject, attention in zip(("model", "draft model"), attentions, strict=False):
        if not attention.capturable:
            return f"the {subject}'s attention, {attention.name}, reads rows' lengths on the host"
    return None
