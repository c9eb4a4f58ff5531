"""One table of several sweeps that differ only in their seed: mean and standard error over the seeds."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mbd_core.evaluation.markdown_sections import table_line
from mbd_core.evaluation.statistics import mean_and_stderr
from mbd_core.evaluation.sweep_folder import read_report

RowKey = tuple[str, str, str, str]


def seed_table(folders: Sequence[Path]) -> str:
    """The table as Markdown. `ValueError` if there are fewer than two sweeps, or a row is not in all of them."""
    if len(folders) < 2:
        raise ValueError("a standard error over seeds needs at least two sweeps")
    by_key: dict[RowKey, list[dict[str, Any]]] = defaultdict(list)
    for folder in folders:
        for key, row in load_rows(folder).items():
            by_key[key].append(row)
    lines = ["| model | method | task | config | n | Acc (%) | TPF | NFE |", "|---|---|---|---|---|---|---|---|"]
    for (model, method, task, config), rows in by_key.items():
        if len(rows) != len(folders):
            raise ValueError(f"{model} {method} {task} {config} is in {len(rows)} of {len(folders)} sweeps")
        num_problems = sum(row["n"] for row in rows)
        means = [_mean_text([row[name] for row in rows]) for name in ("accuracy", "tpf", "nfe")]
        lines.append(table_line([model, method, task, config, num_problems, *means]))
    return "\n".join(lines)


def load_rows(folder: Path) -> dict[RowKey, dict[str, Any]]:
    """A report's rows by model, method, task and the settings in which its configurations differ."""
    rows = read_report(folder)["rows"]
    fields = dict.fromkeys(name for row in rows for name in row["config"])
    varied = [name for name in fields if len({str(row["config"].get(name)) for row in rows}) > 1]
    return {
        (
            row["model"],
            row["method"],
            row["task"],
            ", ".join(f"{name}={row['config'].get(name)}" for name in varied),
        ): row
        for row in rows
    }


def _mean_text(values: Sequence[float | None]) -> str:
    """A dash for what an endpoint did not say."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    mean, stderr = mean_and_stderr(known)
    return f"{mean:.2f} ± {stderr:.2f}"
