"""How long endpoints took for a sweep's requests, network and their other load included."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbd_core.bench.load_rows import percentile
from mbd_core.evaluation.endpoint import is_endpoint
from mbd_core.evaluation.sweep_folder import read_record, read_samples

COLUMNS = ("sample", "model", "method", "task", "config", "problem_id", "seconds")


@dataclass(frozen=True, kw_only=True)
class EndpointSeconds:
    """Percentiles of the seconds of an endpoint's answers to a task; `None` where there are too few for one."""

    model: str
    method: str
    task: str
    n: int
    p50: float | None
    p90: float | None
    p99: float | None


def endpoint_seconds(folders: Sequence[Path]) -> list[EndpointSeconds]:
    """Of each endpoint, method and task in the sweeps; a folder that is named twice counts once."""
    rows: list[Mapping[str, Any]] = []
    for folder in dict.fromkeys(path.resolve() for path in folders):
        if any(is_endpoint(digest) for digest in read_record(folder).plan["models"].values()):
            rows += read_samples(folder, columns=COLUMNS)
    return summarize_seconds(rows)


def summarize_seconds(rows: Iterable[Mapping[str, Any]]) -> list[EndpointSeconds]:
    """The percentiles of rows that have seconds."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["seconds"] is not None:
            groups.setdefault((row["model"], row["method"], row["task"]), []).append(row["seconds"])
    return [
        EndpointSeconds(
            model=model,
            method=method,
            task=task,
            n=len(seconds),
            p50=percentile(seconds, 50),
            p90=percentile(seconds, 90),
            p99=percentile(seconds, 99),
        )
        for (model, method, task), seconds in groups.items()
    ]


def seconds_lines(found: Sequence[EndpointSeconds], labels: Mapping[str, str]) -> list[str]:
    """The section of a report, with what its columns mean."""
    if not found:
        return []
    lines = [
        "",
        "## Endpoints",
        "",
        "Seconds from a request to its whole answer, --concurrency of them under way: ",
    ]
    lines[-1] += "network and the endpoint's other load included, waits for its retries not. Nearest-rank percentiles."
    lines += ["", "| Model | Method | Task | n | p50 / p90 / p99 (s) |", "|---|---|---|---:|---:|"]
    for one in found:
        cells = " / ".join("-" if value is None else f"{value:.3f}" for value in (one.p50, one.p90, one.p99))
        lines.append(f"| {one.model} | {one.method} | {labels[one.task]} | {one.n} | {cells} |")
    return lines
