"""Static steps as CUDA graphs, captured when the server starts.

A step of a kind that has no graph, and that no captured kind covers, runs kernel by kernel and is counted.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from mbd_core.engine.config import EngineConfig
from mbd_core.engine.kinds import StepKind
from mbd_core.engine.static_step import static_step
from mbd_core.engine.step import StepState
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
    """`run` on `device` as a CUDA graph, and what it returned while it was captured: memory that each replay
    overwrites.

    It runs `warm_up` times before; `restore` undoes what that changed. Both happen on `stream`, by default one of its
    own. Temporary memory belongs to a stream, so captures in a row should share one.
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
        # "thread_local": what other threads ask of the device meanwhile does not concern this capture
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = run()
    return graph, result


@dataclass
class StepGraphs:
    """The captured steps of one engine. With an `obstacle` every step runs kernel by kernel.

    obstacle                 why there are no graphs
    num_replayed, num_eager  static steps so far, by how they ran
    memory_bytes             device memory that the graphs took
    """

    state: StepState
    obstacle: str | None
    num_replayed: int = 0
    num_eager: int = 0
    memory_bytes: int = 0
    _captured_steps: "dict[StepKind, CapturedStep]" = field(default_factory=dict)
    _graph_of_kind: "dict[StepKind, CapturedStep | None]" = field(default_factory=dict)
    _pool: Any = None
    _stream: "torch.cuda.Stream | None" = None

    @property
    def enabled(self) -> bool:
        return self.obstacle is None

    def capture(self, kinds: Iterable[StepKind]) -> int:
        """Capture the kinds that are not yet; how many graphs there are then."""
        if self.enabled:
            device = self.state.tables_RP.device
            self._graph_of_kind.clear()
            free, _ = torch.cuda.mem_get_info(device)
            # graphs share their temporary memory: one runs at a time, its report is read before the next replay
            self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
            self._stream = self._stream or torch.cuda.Stream(device)
            # the largest first: the smaller ones then fit into the memory that it has left in the pool
            for kind in sorted(kinds, key=_size, reverse=True):
                if kind not in self._captured_steps:
                    self._captured_steps[kind] = CapturedStep(self.state, kind, self._pool, self._stream)
            self.memory_bytes += free - torch.cuda.mem_get_info(device)[0]
        return len(self._captured_steps)

    def run(self, kind: StepKind, *, num_pages: int) -> Tensor:
        """One static step; its report (X,), good until the next step."""
        graph = self._graph_for(kind)
        if graph is not None:
            self.num_replayed += 1
            return graph.replay()
        self.num_eager += 1
        return static_step(self.state, kind, num_pages=num_pages)

    def release(self, *, wait: bool = True) -> None:
        """Let go of all graphs, after the device has finished: NCCL destroys a communicator only when no graph holds
        it any more. From then on every step runs kernel by kernel. Without `wait` a graph under way ends later.

        The next capture takes another pool: torch refuses one that no graph uses but some tensor still does.
        """
        if self._captured_steps and wait:
            torch.cuda.synchronize(self.state.tables_RP.device)
        for step in self._captured_steps.values():
            step.release()
        self._captured_steps.clear()
        self._graph_of_kind.clear()
        self._pool, self.memory_bytes = None, 0
        self.state.runner.forget_batch()

    def report(self) -> dict[str, Any]:
        """For whoever watches a server: why there are no graphs; how many, their memory, steps by how they ran."""
        return {
            "not_used": self.obstacle,
            "captured": len(self._captured_steps),
            "memory_bytes": self.memory_bytes,
            "steps_replayed": self.num_replayed,
            "steps_eager": self.num_eager,
        }

    def _graph_for(self, kind: StepKind) -> "CapturedStep | None":
        """The graph of the least captured kind that does all that `kind` does."""
        if kind not in self._graph_of_kind:
            candidates = [candidate for candidate in self._captured_steps if candidate.covers(kind)]
            self._graph_of_kind[kind] = self._captured_steps[min(candidates, key=_size)] if candidates else None
        return self._graph_of_kind[kind]


def _size(kind: StepKind) -> tuple[int, int, bool, int, int]:
    """Orders kinds by what their step computes: batch rows, slots, positions with logits, optional work."""
    return kind.num_rows, kind.num_slots, kind.num_asked is None, kind.num_asked or 0, sum(vars(kind.work).values())


class CapturedStep:
    """A static step as a CUDA graph. Warming up runs it, so what it moved on is put back; the keys it wrote are those
    that the step itself will write."""

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
        """Run the captured step; its report, overwritten by the next replay."""
        self._graph.replay()
        self._runner.last_batch = self._batch
        return self._report_X

    def release(self) -> None:
        """Give its memory back, and the communicator that it holds."""
        self._graph.reset()


def graphs_obstacle(
    config: EngineConfig, attention: AttentionKernel, device: torch.device, *, static_shapes: bool
) -> str | None:
    """Why static steps do not become graphs, if so; they do wherever they can, unless `config.graphs` is `False`.
    `ValueError` if they cannot and must."""
    obstacle = _obstacle(config, attention, device, static_shapes=static_shapes)
    if config.graphs and obstacle is not None:
        raise ValueError(f"graphs=True cannot be honoured: {obstacle}")
    return "graphs=False was asked for" if config.graphs is False else obstacle


def _obstacle(
    config: EngineConfig, attention: AttentionKernel, device: torch.device, *, static_shapes: bool
) -> str | None:
    if not static_shapes:
        return "without static_shapes=True no step has a shape that repeats"
    if device.type != "cuda":
        return f"CUDA graphs need a GPU, this is {device.type}"
    if config.batch_invariant:
        return "with batch_invariant=True rows' lengths are read on the host"
    if not attention.capturable:
        return f"the {attention.name} attention reads rows' lengths on the host"
    return None
