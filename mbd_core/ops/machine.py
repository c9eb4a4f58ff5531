"""A machine's properties: its instructions, free memory, the seconds of a call, the speed of its matrix products."""

import ctypes
import logging
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import torch

LOGGER = logging.getLogger(__name__)


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int, *, calls: int = 1) -> float:
    """Seconds of one call in the fastest of `repeats` runs of `calls` calls each, after one warm-up run.

    On CUDA the device's own events measure. Calls of microseconds need many `calls`, so that the device is timed
    instead of the host that launches them.
    """
    best = float("inf")
    for attempt in range(repeats + 1):
        seconds = _on_cuda(run, device, calls) if device.type == "cuda" else _on_host(run, calls)
        if attempt:
            best = min(best, seconds / calls)
    return best


def _on_cuda(run: Callable[[], object], device: torch.device, calls: int) -> float:
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _on_host(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 arithmetic. A CPU without it takes up to 100 times as long as in float32.

    A CPU is asked for its instructions. oneDNN's own answer counts x86 CPUs that only emulate bfloat16.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()
    if has["architecture"] == "x86_64":
        return bool(has["avx512_bf16"] or has["amx_bf16"])
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def warn_of_emulation(device: torch.device) -> None:
    """Warns once in a process if work in bfloat16 on this device will take many times as long as in float32."""
    if device.type == "cpu" and not computes_bfloat16(device):
        LOGGER.warning(
            "this CPU emulates bfloat16, which can take 100 times as long as float32: name float32 or auto in new runs"
        )


def end_team() -> None:
    """Ends the threads that OpenMP keeps for the calling thread. They return with its next large operation.

    An engine steps in another thread than the thread that loaded it. With a team for each, a process has more threads
    than cores, and GNU's OpenMP puts threads to sleep after each operation, which slows a small model's tokens.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(1)  # softly: no data of the threads is lost


CGROUP = Path("/sys/fs/cgroup")


def free_host_memory() -> int:
    """Bytes that this process can still take: the machine's, or less if a container (cgroup v2) has a limit.

    A container's file cache counts as free: the kernel gives it back when it is needed.
    """
    available = int(psutil.virtual_memory().available)
    try:
        limit, usage = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return min(available, limit - usage + int(statistics["inactive_file"]))
    except (OSError, ValueError):  # no such file, or "max"
        return available


def measure_flops(device: torch.device, dtype: torch.dtype, *, size: int | None = None, repeats: int = 5) -> float:
    """Floating-point operations a second of a square matrix product, by default 8192 wide on CUDA, 1024 elsewhere."""
    if size is None:
        size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / best_seconds(lambda: torch.mm(a, b, out=out), device, repeats)
