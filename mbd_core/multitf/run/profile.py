"""Measurements of a run on demand: a trace of some updates by torch's profiler, and a GPU's memory.

Each worker writes its files into `profile/` of the run's folder: the trace for https://ui.perfetto.dev, the memory
snapshot for https://docs.pytorch.org/memory_viz.
"""

import tempfile
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from mbd_core.multitf.config import Measuring
from mbd_core.multitf.run.checkpoints import Checkpoints
from mbd_core.multitf.step.workers import Workers

SKIPPED = 2
"""Updates before the measured ones; they compile, allocate and fill caches."""
MAX_EVENTS = 200_000  # of a memory snapshot


class Profile:
    """Measures some of the next `num_left` updates of a run; `step` is called after each update."""

    def __init__(self, measuring: Measuring, checkpoints: Checkpoints, workers: Workers, *, num_left: int) -> None:
        self.measuring, self.checkpoints, self.workers = measuring, checkpoints, workers
        self._last = min(num_left, SKIPPED + measuring.updates)
        self._first = max(0, self._last - measuring.updates)
        self._num_steps, self._trace = 0, None
        if measuring.profile:
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (workers.device.type == "cuda")]
            self._trace = profile(activities=activities, record_shapes=True)

    def __enter__(self) -> "Profile":
        if self.measuring.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        self._begin()
        return self

    def step(self) -> None:
        """Counts an update."""
        self._num_steps += 1
        if self._num_steps == self._last:
            self._write()
        self._begin()

    def _begin(self) -> None:
        if self._trace is not None and self._num_steps == self._first < self._last:
            self._trace.start()

    def _write(self) -> None:
        rank = self.workers.rank
        with tempfile.TemporaryDirectory(prefix="mbd-profile-") as folder:
            files = []
            if self._trace is not None:
                self._trace.stop()
                files.append(Path(folder) / f"updates_worker_{rank}.json.gz")
                self._trace.export_chrome_trace(str(files[-1]))
            if self.measuring.memory_snapshot:
                files.append(Path(folder) / f"memory_worker_{rank}.pickle")
                torch.cuda.memory._dump_snapshot(str(files[-1]))
                torch.cuda.memory._record_memory_history(enabled=None)
            for file in files:
                (self.checkpoints.folder / "profile").write_file(file.name, file)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._trace is not None and self._first <= self._num_steps < self._last:
            self._trace.stop()


def check_measuring(measuring: Measuring, device: torch.device) -> None:
    """Raises `ValueError` for a memory snapshot on a CPU."""
    if measuring.memory_snapshot and device.type != "cuda":
        raise ValueError(
            "measuring.memory_snapshot records what a GPU's memory holds, and this training computes on a CPU; "
            "leave it out"
        )
