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
    """Each configuration over the sweeps. Raises `ValueError` for fewer than two sweeps, for two sweeps of one seed,
    and for a configuration that a sweep lacks."""
    if len(folders) < 2:
        raise ValueError("a standard error over seeds needs at least two sweeps")
    reports = [read_report(folder) for folder in folders]
    _check_seeds(folders, [report["settings"] for report in reports])
    varied = varied_names([row["config"] for report in reports for row in report["rows"]])
    by_key: dict[RowKey, list[dict[str, Any]]] = defaultdict(list)
    for report in reports:
        for row in report["rows"]:
            by_key[row["model"], row["method"], row["task"], settings_text(row["config"], varied)].append(row)
    metrics = (ACCURACY, TPF, NFE)
    table_rows: list[Sequence[Cell]] = []
    for key, rows in by_key.items():
        if len(rows) != len(folders):
            raise ValueError(f"{' '.join(key)} is in {len(rows)} of {len(folders)} sweeps")
        means = [_mean_text([row[metric.field] for row in rows]) for metric in metrics]
        table_rows.append((*key, sum(row["n"] for row in rows), *means))
    heads = ("model", "method", "task", "config", "n", *(metric.head for metric in metrics))
    return Table(columns=heads, rows=table_rows)


def _check_seeds(folders: Sequence[Path], settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` if two reports have a sweep of one seed. A joined report has the settings of several
    sweeps."""
    folder_of: dict[int, Path] = {}
    for folder, of_report in zip(folders, settings, strict=True):
        sweeps = [of_report, *(value for value in of_report.values() if isinstance(value, Mapping))]
        for seed in {sweep["seed"] for sweep in sweeps if "seed" in sweep}:
            if seed in folder_of:
                raise ValueError(
                    f"{folder_of[seed]} and {folder} are both of seed {seed}; give one sweep of each seed"
                )
            folder_of[seed] = folder


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
