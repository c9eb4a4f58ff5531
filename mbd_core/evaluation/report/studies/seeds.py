"""Sweeps that differ only in their seed: mean and standard error over the seeds."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mbd_core.evaluation.measures.statistics import mean_and_stderr
from mbd_core.evaluation.report.metrics import ACCURACY, NFE, TPF
from mbd_core.evaluation.sweep.folder import read_report
from mbd_core.tables import Cell, Table

RowKey = tuple[str, str, str, str]


def seed_table(folders: Sequence[Path]) -> Table:
    """Each configuration over the sweeps. Raises `ValueError` for fewer than two sweeps, and for a
    configuration that a sweep lacks."""
    if len(folders) < 2:
        raise ValueError("a standard error over seeds needs at least two sweeps")
    by_key: dict[RowKey, list[dict[str, Any]]] = defaultdict(list)
    for folder in folders:
        for key, row in _rows_by_key(folder).items():
            by_key[key].append(row)
    metrics = (ACCURACY, TPF, NFE)
    table_rows: list[Sequence[Cell]] = []
    for key, rows in by_key.items():
        if len(rows) != len(folders):
            raise ValueError(f"{' '.join(key)} is in {len(rows)} of {len(folders)} sweeps")
        means = [_mean_text([row[metric.field] for row in rows]) for metric in metrics]
        table_rows.append((*key, sum(row["n"] for row in rows), *means))
    heads = ("model", "method", "task", "config", "n", *(metric.head for metric in metrics))
    return Table(columns=heads, rows=table_rows)


def _rows_by_key(folder: Path) -> dict[RowKey, dict[str, Any]]:
    """A report's rows by model, method, task and the settings in which its configurations differ."""
    rows = read_report(folder)["rows"]
    varied = varied_names([row["config"] for row in rows])
    return {(row["model"], row["method"], row["task"], settings_text(row["config"], varied)): row for row in rows}


def varied_names(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields in which configurations differ."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({str(config.get(name)) for config in configs}) > 1]


def settings_text(config: Mapping[str, Any], names: Iterable[str]) -> str:
    """The named fields of a configuration and their values."""
    return ", ".join(f"{name}={config.get(name)}" for name in names)


def _mean_text(values: Sequence[float | None]) -> str | None:
    """Mean and standard error; `None` if an endpoint does not report the number."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None
    mean, stderr = mean_and_stderr(numbers)
    return f"{mean:.2f} ± {stderr:.2f}"
