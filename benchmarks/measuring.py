"""Shared parts of the benchmarks: a device, the seconds of a call, runs that take turns, and Markdown tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mbd_core.errors import first_line
from mbd_core.tables import Cell, Table
from mbd_core.tables import markdown as table_markdown

if TYPE_CHECKING:
    import torch


def usable_device(name: str | None) -> torch.device:
    """The device with that name, by default the GPU if there is one; `ValueError` unless it is a CPU or a GPU here."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).split(". ")[0]
        raise ValueError(f"--device {name} cannot be used: {reason}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name} cannot be used; take cpu or cuda")
    return device


def device_name(device: torch.device) -> str:
    """The device as a report names it."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"


def run_seconds(
    run: Callable[[], object], *, wait: torch.device | None = None, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The seconds of one call; with `wait`, until this GPU has done all its work."""
    start = clock()
    run()
    if wait is not None:
        import torch

        torch.cuda.synchronize(wait)
    return clock() - start


@dataclass(frozen=True)
class Times:
    """Seconds of a call: on the clock, and of the processor in all threads. Other work on the machine does not change
    the second."""

    wall: float
    processor: float


def timed(run: Callable[[], object]) -> Callable[[], Times]:
    """`run` as a call that returns its times."""

    def call() -> Times:
        processor = time.process_time()
        return Times(run_seconds(run), time.process_time() - processor)

    return call


T = TypeVar("T")


def interleaved(
    runs: Mapping[str, Callable[[], T]], *, repeats: int, after: Callable[[], object] | None = None
) -> dict[str, list[T]]:
    """The results of `repeats` calls of each run. The runs take turns; `after` is called after every run.

    So a slow period of the machine slows all runs alike. Every round begins with another run, so that no run always
    follows the same one. Raises `ValueError` for `repeats` below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    names = list(runs)
    results: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(runs[name]())
            if after is not None:
                after()
    return results


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each run's values."""
    return {name: statistics.median(of_run) for name, of_run in values.items()}


def median_times(values: Mapping[str, Sequence[Times]]) -> dict[str, Times]:
    """The median of each run's two kinds of seconds, each by itself."""
    return {
        name: Times(statistics.median(t.wall for t in of_run), statistics.median(t.processor for t in of_run))
        for name, of_run in values.items()
    }


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table of `rows`; `columns` maps a key to a heading and, after a bar, a format (`"step (ms)|.2f"`).

    Under a heading that ends in "(ms)", seconds are shown as milliseconds. A missing value, or `None`, is a dash.
    """
    split = {key: (*text.split("|"), "")[:2] for key, text in columns.items()}
    table = Table(
        columns=[title for title, _ in split.values()],
        rows=[[_cell(row.get(key), title, form) for key, (title, form) in split.items()] for row in rows],
    )
    return table_markdown([table]).rstrip("\n")


def _cell(value: Any, title: str, form: str) -> Cell:
    if value is None or isinstance(value, bool):
        return value
    return format(value * 1e3 if title.endswith("(ms)") else value, form)
