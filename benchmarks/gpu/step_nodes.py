"""The nodes of a captured decoding step, counted without a GPU: `python -m benchmarks.gpu.step_nodes`.

The step's own code runs on tensors that have shapes and no values, with the kernels that a GPU of compute capability
9.0 gets. A read of a value fails, as it would while a CUDA graph is captured. Each operation that computes something
counts as one node. For some operations (`MULTI_KERNEL`) torch launches several kernels, so a step with these has more
nodes than are counted. The work on the Block Buffer is counted apart, because a GPU runs it compiled, in fewer kernels
than operations.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from benchmarks.measuring import markdown
from mbd_core.decoding.blocks.work import StepWork
from mbd_core.engine.build import build_parts
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.step import static_step as static
from mbd_core.engine.step.kinds import StepKind
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES
from mbd_core.ops.launch import watched_launches

CUDA, META = torch.device("cuda", 0), torch.device("meta")
aten = torch.ops.aten
_SAME_MEMORY = ("lift_fresh", "_unsafe_view")
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", *_SAME_MEMORY)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class StandIn(Tensor):
    """A tensor that reports CUDA as its device. `content` is a tensor of its shape on another device."""

    content: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, content: Tensor) -> Self:
        # to torch itself it is on the meta device, so that nothing reads it behind the mode's back
        with torch.inference_mode(False):
            tensor = Tensor._make_wrapper_subclass(
                cls,
                content.size(),
                strides=content.stride(),
                storage_offset=content.storage_offset(),
                dtype=content.dtype,
                device=META,
            )
        tensor.content = content
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} was called outside the device")


class Shape(StandIn):
    """A tensor of the device; `content` is on torch's meta device."""


class ShapeDevice(TorchDispatchMode):
    """Computes shapes, and counts launches and bytes.

    `nodes` counts launches by name: every operation of torch that computes something, and every Triton kernel. Views
    and allocations launch nothing. `num_bytes` counts the bytes of all tensors that were made; every result lies in
    one of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # `to`, `flatten` and `linear` become other operations, by the tensors' properties; on CUDA RMSNorm stays one
        if func._can_decompose() and func.overloadpacket is not aten.rms_norm:
            with self:
                return func.decompose(*args, **kwargs)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            device = kwargs.get("device")
            on_device = any(isinstance(t, Shape) for t in _leaves((args, kwargs)))
            if device is not None:
                on_device = torch.device(device).type == "cuda"
            if not on_device:
                return func(*args, **kwargs)
            kwargs |= {} if device is None else {"device": META}
            kwargs.pop("pin_memory", None)
            result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
            if not func.is_view and func.overloadpacket.__name__ not in _ALLOCATIONS:
                self.nodes[func.overloadpacket.__name__] += 1
            if not func.is_view and not func._schema.is_mutable and func.overloadpacket.__name__ not in _SAME_MEMORY:
                self.num_bytes += sum(t.nbytes for t in _leaves(result) if isinstance(t, Tensor))
            if func._schema.is_mutable:
                return kwargs["out"] if "out" in kwargs else args[0]
            return tree_map(_wrap, result)

    def move(self, module: nn.Module) -> nn.Module:
        """`module`, which is on the meta device, with its parameters and buffers on this one."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(Shape.of(parameter.detach()), requires_grad=False)
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else Shape.of(buffer)
        return module


class _UndispatchedCalls(TorchFunctionMode):
    """The calls of torch that no dispatch mode sees."""

    def __init__(self, device: ShapeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            self._device.nodes["copy from the host"] += 1
            return Shape.of(torch.tensor(*args, **{**kwargs, "device": META}))
        if func == _SET_DATA and isinstance(args[0], Shape):
            args[0].content = args[1].content
        return func(*args, **kwargs)


@contextmanager
def shape_device() -> Iterator[ShapeDevice]:
    """Inside, `cuda` is this device, of compute capability 9.0; no Triton kernel runs."""
    device = ShapeDevice()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cuda, "_lazy_init"))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)))
        stack.enter_context(watched_launches(lambda name: device.nodes.update([f"triton: {name}"])))
        stack.enter_context(_UndispatchedCalls(device))
        stack.enter_context(device)
        yield device


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    else:
        yield value


def _inner(value: Any) -> Any:
    if isinstance(value, Shape):
        return value.content
    return value.to(META) if isinstance(value, Tensor) and value.ndim else value


def _wrap(value: Any) -> Any:
    return Shape.of(value) if isinstance(value, Tensor) else value


WORKS = {
    "greedy": StepWork(),
    "T2T": StepWork(revises=True),
    "DMax": StepWork(revises=True, softens=True),
}
MULTI_KERNEL = frozenset({"addmm", "sort", "topk", "argsort", "cumsum", "cumprod", "nonzero_static"})
"""Operations for which torch launches more than one kernel, by their sizes."""


@dataclass(frozen=True, kw_only=True)
class StepNodes:
    """What one step launches.

    step       nodes of the step without its work on the Block Buffer
    layer      nodes of its last layer
    compiled   operations of the work on the Block Buffer
    num_bytes  bytes of all tensors that the step makes
    """

    step: Counter[str]
    layer: Counter[str]
    compiled: Counter[str]
    num_bytes: int

    @property
    def inexact(self) -> frozenset[str]:
        """The operations of the step for which torch launches more than one kernel."""
        return MULTI_KERNEL & set(self.step)


def step_nodes(
    config: ModelConfig, work: StepWork, *, num_rows: int = 1, num_slots: int = 2, num_asked: int | None = 48
) -> StepNodes:
    """The nodes of a static step in bfloat16; a layer's nodes are the difference that one more layer makes."""
    kind = StepKind(num_rows=num_rows, num_slots=num_slots, num_asked=num_asked, work=work)
    step, compiled, num_bytes = _count(config, kind)
    shorter, _, _ = _count(replace(config, num_layers=config.num_layers - 1), kind)
    return StepNodes(step=step, layer=step - shorter, compiled=compiled, num_bytes=num_bytes)


def _count(config: ModelConfig, kind: StepKind) -> tuple[Counter[str], Counter[str], int]:
    with torch.device("meta"):
        model = Decoder(config).to(torch.bfloat16).eval().requires_grad_(False)
    rows, slots = kind.num_rows, kind.num_slots
    sizes = EngineConfig(max_rows=rows, buffer_size=slots, num_pages=rows * 64, graphs=False)
    with shape_device() as device, torch.inference_mode():
        device.move(model)
        state = build_parts(model, sizes, vocab_limit=None).state
        device.nodes.clear()
        device.num_bytes = 0
        compiled: Counter[str] = Counter()
        with _counted_apart(device, compiled):
            static.static_step(state, kind, num_pages=state.tables_RP.shape[1])
        return device.nodes - compiled, compiled, device.num_bytes


@contextmanager
def _counted_apart(device: ShapeDevice, nodes: Counter[str]) -> Iterator[None]:
    """Inside, the operations of both halves of a static step's work on the Block Buffer are added to `nodes` too."""

    def counted(half: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            before = device.nodes.copy()
            result = half(*args, **options)
            nodes.update(device.nodes - before)
            return result

        return run

    with ExitStack() as stack:
        for half in (static._before_forward, static._after_forward):
            stack.enter_context(mock.patch.object(static, half.__name__, counted(half)))
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """0: counted; 2: bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.step_nodes", description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llada2-mini")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--buffer", type=int, default=2, help="slots of each row")
    options = parser.parse_args(argv)
    if options.rows < 1 or options.buffer < 1:
        print(f"error: --rows {options.rows} --buffer {options.buffer}: both must be at least 1", file=sys.stderr)
        return 2
    config = SHAPES[options.model]
    num_logits = -(-3 * options.rows * options.buffer * config.block_size // 4)
    nodes_by_work = {
        name: step_nodes(config, work, num_rows=options.rows, num_slots=options.buffer, num_asked=num_logits)
        for name, work in WORKS.items()
    }
    rows = [
        {
            "work": name,
            "layer": nodes.layer.total(),
            "step": nodes.step.total(),
            "compiled": nodes.compiled.total(),
            "inexact": ", ".join(sorted(nodes.inexact)) or None,
            "megabytes": nodes.num_bytes / 1e6,
        }
        for name, nodes in nodes_by_work.items()
    ]
    columns = {
        "work": "work",
        "layer": "a layer",
        "step": "a step",
        "inexact": "of them inexact",
        "compiled": "compiled",
    }
    print(markdown(rows, columns | {"megabytes": "results (MB)|.1f"}), "\n")
    greedy = nodes_by_work["greedy"]
    of_greedy = [{"node": name, "layer": greedy.layer[name], "step": n} for name, n in greedy.step.most_common()]
    print(markdown(of_greedy, {"node": "greedy: node", "layer": "a layer", "step": "a step"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
