"""A CUDA device without a GPU: its tensors have shapes and no values, and what would be launched on it is counted.

Code that runs on these tensors takes the ways that it takes on a GPU of compute capability 9.0. Whatever asks for a
value fails, as it would while a CUDA graph is captured.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from mbd_core.ops.triton_launch import watched_launches

CUDA, META = torch.device("cuda", 0), torch.device("meta")
aten = torch.ops.aten
_SAME_MEMORY = ("lift_fresh", "_unsafe_view")
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", *_SAME_MEMORY)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class StandIn(Tensor):
    """A tensor that is on CUDA for all who ask it; `content`, a tensor elsewhere, has its shape."""

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
    """Computes shapes. `nodes` counts what would be launched: each of torch's operations that computes something as
    one, under its name, and each Triton kernel. Views and allocations launch nothing. `num_bytes` counts those of all
    tensors that were made, in which every result lies."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # `to`, `flatten` or `linear`: what is done depends on the tensors; CUDA has RMSNorm as one operation
        if func._can_decompose() and func.overloadpacket is not aten.rms_norm:
            with self:
                return func.decompose(*args, **kwargs)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            asked = kwargs.get("device")
            on_device = any(isinstance(t, Shape) for t in _leaves((args, kwargs)))
            if asked is not None:
                on_device = torch.device(asked).type == "cuda"
            if not on_device:
                return func(*args, **kwargs)
            kwargs |= {} if asked is None else {"device": META}
            kwargs.pop("pin_memory", None)
            out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
            if not func.is_view and func.overloadpacket.__name__ not in _ALLOCATIONS:
                self.nodes[func.overloadpacket.__name__] += 1
            if not func.is_view and not func._schema.is_mutable and func.overloadpacket.__name__ not in _SAME_MEMORY:
                self.num_bytes += sum(t.nbytes for t in _leaves(out) if isinstance(t, Tensor))
            if func._schema.is_mutable:
                return kwargs["out"] if "out" in kwargs else args[0]
            return tree_map(_wrap, out)

    def move(self, module: nn.Module) -> nn.Module:
        """`module`, which is on the meta device, with its parameters and buffers on this one."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(Shape.of(parameter.detach()), requires_grad=False)
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else Shape.of(buffer)
        return module


class _Untold(TorchFunctionMode):
    """What torch does without telling a dispatch mode."""

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
        stack.enter_context(_Untold(device))
        stack.enter_context(device)
        yield device


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for one in value:
            yield from _leaves(one)
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
