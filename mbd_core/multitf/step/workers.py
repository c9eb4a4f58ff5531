"""The processes that train together over torch's default process group: the own rank, and collective operations.

Ray Train or torchrun starts them; without either a run has one worker and no group.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor, distributed

from mbd_core.multitf.config import Precision
from mbd_core.multitf.step.compute import compute_precision
from mbd_core.multitf.step.trainer import StepMetrics

T = TypeVar("T")


@dataclass(frozen=True)
class Workers:
    """This worker's rank among `size`, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, tensor: Tensor) -> Tensor:
        """The tensor's mean over the workers, on each of them."""
        total = tensor.clone()
        if self.size > 1:
            distributed.all_reduce(total)
        return total / self.size

    def mean_metrics(self, metrics: StepMetrics) -> StepMetrics:
        """A step's loss averaged over the workers, its accuracy over their labels, and its counts summed, in one
        exchange."""
        if self.size == 1:
            return metrics
        m = metrics
        numbers = [m.loss, m.accuracy * m.labels, m.labels, m.tokens, m.positions, m.tflop, *m.sums]
        numbers_here = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        loss, hits, labels, *means = self.mean(numbers_here).tolist()
        tokens, positions, tflop, *sums = (number * self.size for number in means)
        return replace(
            m,
            loss=loss,
            accuracy=hits / labels if labels else 0.0,
            labels=round(labels * self.size),
            tokens=round(tokens),
            positions=round(positions),
            tflop=tflop,
            sums=tuple(sums),
        )

    def least(self, number: int) -> int:
        """The least of the workers' numbers."""
        numbers = torch.tensor(int(number), device=self.device)  # gloo takes no booleans
        if self.size > 1:
            distributed.all_reduce(numbers, op=distributed.ReduceOp.MIN)
        return int(numbers)

    def all_values(self, value: T) -> list[T]:
        """Every worker's value, by rank."""
        values = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value)
        return values

    @staticmethod
    def _raise_first(problems: Sequence[str | None]) -> None:
        for problem in problems:
            if problem is not None:
                raise ValueError(problem)

    @contextmanager
    def folder_of_machine(self, write: Callable[[Path], None]) -> Iterator[Path]:
        """A temporary folder that one worker of each machine writes, for all workers of the machine. All workers call
        it.

        It is removed after the block, in which its files are opened. A worker killed while it writes leaves it in the
        temporary folder. Machines are told apart by their names. Raises `ValueError` on all workers if `write` raises
        it on one, if the folder cannot be written, or if one worker does not see it.
        """
        names = self.all_values(platform.node())
        writer = names.index(names[self.rank])
        folder, problem = "", None
        try:
            if writer == self.rank:
                try:
                    folder = tempfile.mkdtemp(prefix="mbd-data-")
                    write(Path(folder))
                except ValueError as error:
                    problem = str(error)
                except OSError as error:
                    problem = f"the training samples cannot be written: {error}; TMPDIR names another place for them"
            folders = self.all_values((folder, problem))
            self._raise_first([problem for _, problem in folders])
            machine_folder = Path(folders[writer][0])
            sentence = (
                f"a worker does not find {machine_folder}, which another worker of {platform.node()} has written"
            )
            self._raise_first(
                self.all_values(None if machine_folder.is_dir() else f"{sentence}; give each host its own name")
            )
            yield machine_folder
            self.all_values(None)
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def precision(self, choice: Precision) -> Literal["float32", "bfloat16"]:
        """The precision of all workers: for `auto`, the least capable worker decides. Every worker calls it."""
        return "bfloat16" if self.least(compute_precision(choice, self.device) == "bfloat16") else "float32"


ALONE = Workers(rank=0, size=1, device=torch.device("cpu"))
"""This process alone, on the CPU."""


@contextmanager
def torchrun_workers() -> Iterator[Workers]:
    """The workers that torchrun started, from its environment variables; without these, this process alone."""
    size, rank, local = (int(os.environ.get(n, d)) for n, d in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if size == 1:
        yield Workers(rank, size, device)
        return
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield Workers(rank, size, device)
        distributed.barrier()  # a worker that ends first would break its neighbours' last exchange
    finally:
        distributed.destroy_process_group()
