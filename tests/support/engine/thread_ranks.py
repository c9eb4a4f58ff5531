"""Tensor-parallel ranks as threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ThreadRanks:
    """`size` ranks; `reduce(rank)` sums over them, in the order of the ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def reduce(self, rank: int) -> Callable[[Tensor], Tensor]:
        def summed(x: Tensor) -> Tensor:
            self._parts[rank] = x
            self._barrier.wait()
            total = torch.stack(self._parts).sum(0)
            self._barrier.wait()
            return total

        return summed

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What `work(rank)` returns on each rank, all running at once."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))
