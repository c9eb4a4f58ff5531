"""The seconds that a call takes, also on asynchronous devices."""

import time
from collections.abc import Callable

import torch


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int, *, calls: int = 1) -> float:
    """Seconds of one call in the fastest of `repeats` runs of `calls` calls each, after one warm-up run.

    On CUDA the device's own events measure. Calls of microseconds need many `calls`, so that the device, not the host
    that launches them, is what is timed.
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
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - started
