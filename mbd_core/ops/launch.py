"""Triton kernels: their use, compilation and launch. Launches can be counted without a GPU or Triton."""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_watcher: ContextVar[Callable[[str], None] | None] = ContextVar("watcher", default=None)


class Kernel:
    """A Triton kernel, compiled by its first call (or, under Triton's interpreter, prepared for it).

    Triton is imported by that call and not before, so that the kernel's file can be imported without Triton. The
    file's global `tl` becomes `triton.language`, and the functions that its kernels call, `parts`, are compiled.
    """

    def __init__(
        self, fn: Callable[..., Any], *, parts: Sequence[Callable[..., Any]] = (), changing: Sequence[str] = ()
    ) -> None:
        """`changing` are arguments whose values differ from call to call without a new compilation."""
        self.fn, self._parts, self._changing = fn, parts, changing

    @functools.cached_property
    def compiled(self) -> Any:
        import triton
        import triton.language

        names = self.fn.__globals__
        names["tl"] = triton.language
        for part in self._parts:
            if names[part.__name__] is part:
                names[part.__name__] = triton.jit(part)
        return triton.jit(self.fn, do_not_specialize=list(self._changing))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compiled[grid]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """`kernel[grid](...)` on the device of its first argument, a tensor; Triton itself takes the current device.

    Inside `watched_launches` the kernel is named instead and does not run.
    """
    see, first = _watcher.get(), arguments[0]
    assert isinstance(first, torch.Tensor)
    if see is None:
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            kernel[grid](*arguments, **options)
    else:
        function = kernel.fn
        see(f"{function.__module__.rpartition('.')[2]}.{function.__name__.strip('_').removesuffix('_kernel')}")


def power_of_two(number: int) -> int:
    """The least power of two at or above `number`, as block sizes are. It is `triton.next_power_of_2` without
    Triton."""
    return 1 << (number - 1).bit_length()


@contextmanager
def watched_launches(see: Callable[[str], None]) -> Iterator[None]:
    """Inside, `see` gets the file and the function of each kernel that would run. None runs."""
    token = _watcher.set(see)
    try:
        yield
    finally:
        _watcher.reset(token)


def triton_serves(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the fused kernels are used for tensors of `dtype` on `device`.

    They are used on CUDA from compute capability 8.0 on, with Triton installed, for the dtypes of models. Elsewhere
    their definitions in plain torch are used.
    """
    return device.type == "cuda" and dtype in DTYPES and _has_triton() and _capable(device)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
