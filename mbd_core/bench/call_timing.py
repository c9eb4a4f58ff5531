"""The seconds that a call takes, also on asynchronous devices."""

import time
from collections.abc import Callable

import torch


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs after one warm-up run; CUDA is synchronised before and after each."""
    best = float("inf")
    for attempt in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if attempt:
            best = min(best, time.perf_counter() - started)
    return best
