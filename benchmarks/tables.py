"""The common part of the benchmarks: runs that take turns, the paper's rows, and Markdown tables."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mbd_core.tables import Cell, Table
from mbd_core.tables import markdown as table_markdown

# Table 3 of the MBD-LMs paper: LLaDA2-Mini at batch 1 on two H100 (TP=2), by N_buf. Step latency in seconds.
PAPER_TABLE_3: dict[int, dict[str, Any]] = {
    1: {"model": "LLaDA2-Mini", "step_seconds": 7.07e-3, "tpf": 3.47, "tps": 517.16},
    2: {"model": "MBD-LLaDA2-Mini", "step_seconds": 8.78e-3, "tpf": 6.19, "tps": 745.92},
}
PAPER_STEP_RATIO = 1.24


def interleaved(
    runs: Mapping[str, Callable[[], float]], *, repeats: int, after: Callable[[], object] | None = None
) -> dict[str, list[float]]:
    """The results of `repeats` calls of each run. The runs take turns; `after` is called after every run.

    A slow period of the machine then slows all runs alike. Every round begins with another run, so that a run does not
    always follow the same one. Raises `ValueError` for `repeats` below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")
    names = list(runs)
    results: dict[str, list[float]] = {name: [] for name in names}
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


def buffer_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The step time at buffer_size N divided by that at 1, for every (model, rows, prefix) that has both."""
    single = {(r["model"], r["rows"], r["prefix"]): r["step_seconds"] for r in rows if r["buffer_size"] == 1}
    return [
        {
            "model": r["model"],
            "rows": r["rows"],
            "prefix": r["prefix"],
            "buffer_size": r["buffer_size"],
            "step_over_single": r["step_seconds"] / single[key],
            "paper": PAPER_STEP_RATIO if r["buffer_size"] == 2 else None,
        }
        for r in rows
        if r["buffer_size"] > 1 and (key := (r["model"], r["rows"], r["prefix"])) in single
    ]


def host_growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ratio of a step's host work at the most rows to that at the fewest, for every (model, buffer, prefix) with
    several; `growth_beside_forward` is the same ratio of step time minus forward time."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["buffer_size"], row["prefix"]), []).append(row)
    growths = []
    for (model, buffer_size, prefix), group in groups.items():
        few, many = (pick(group, key=lambda r: r["rows"]) for pick in (min, max))
        if few["rows"] == many["rows"]:
            continue
        growths.append(
            {
                "model": model,
                "buffer_size": buffer_size,
                "prefix": prefix,
                "from_rows": few["rows"],
                "to_rows": many["rows"],
                "growth": many["host_seconds"] / few["host_seconds"],
                "growth_beside_forward": (many["step_seconds"] - many["forward_seconds"])
                / (few["step_seconds"] - few["forward_seconds"]),
            }
        )
    return growths


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
