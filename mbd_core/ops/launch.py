"""Where Triton kernels are used, and where all of them are launched, so that launches can be counted without a GPU."""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_watcher: ContextVar[Callable[[str], None] | None] = ContextVar("watcher", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """`kernel[grid](...)` on the device of its first argument, a tensor: Triton itself takes the current one. Inside
    `watched_launches` the kernel is named instead and does not run."""
    see, first = _watcher.get(), arguments[0]
    assert isinstance(first, torch.Tensor)
    if see is None:
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            kernel[grid](*arguments, **options)
    else:
        function = kernel.fn  # of triton.jit
        see(f"{function.__module__.rpartition('.')[2]}.{function.__name__.strip('_').removesuffix('_kernel')}")


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`: sizes of blocks are such. `triton.next_power_of_2` without
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
    """Whether the fused kernels are used for tensors of `dtype` on `device`: on CUDA from compute capability 8.0 on,
    where Triton is installed, for the dtypes of models. Elsewhere their definitions in plain torch are."""
    return device.type == "cuda" and dtype in DTYPES and _installed() and _capable(device)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
