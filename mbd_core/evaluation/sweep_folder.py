"""A sweep's folder: `samples/part-*.parquet` (one row for each sample), `plot.png`, `report.md`, `report.json`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.evaluation.sweep_markdown import render_markdown
from mbd_core.evaluation.sweep_report import AupRow, ReportRow
from mbd_core.evaluation.tradeoff_plot import draw_plot
from mbd_core.files import check_target_folder, claim_folder, file_beside, write_json, write_text

KIND = "sweep"
REPORT = "report.json"
FAILURE = "failure.txt"  # the traceback of a sweep that failed
FILES = ("samples/part-*.parquet", "plot.png", "report.md", REPORT, FAILURE)


def check_sweep_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Raise `ValueError` if a sweep cannot be written to `folder` (`mbd_core.files`)."""
    check_target_folder(folder, KIND, overwrite=overwrite, in_place=True)


def claim_sweep_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Make `folder` for a sweep's files; the files of an earlier sweep in it are removed."""
    claim_folder(folder, KIND, FILES, overwrite=overwrite)


def write_samples(folder: Path, number: int, table: pa.Table) -> None:
    """Write part `number` of the samples."""
    with file_beside(folder / "samples" / f"part-{number:05d}.parquet") as path:
        pq.write_table(table, path)


def write_report(
    folder: Path,
    rows: Sequence[ReportRow],
    aups: Sequence[AupRow],
    *,
    labels: Mapping[str, str],
    settings: Mapping[str, Any],
) -> str:
    """Write the plot, the report as Markdown and, last, as JSON; returns the Markdown.

    `labels` maps task names to column heads; `settings` come from `sweep_settings`.
    """
    text = render_markdown(rows, aups, labels=labels, settings=settings)
    content = {
        "rows": [
            {
                "model": row.key.model,
                "method": row.key.method,
                "task": row.key.task,
                "config": json.loads(row.key.config),
                **asdict(row.summary),
            }
            for row in rows
        ],
        "aup": [asdict(aup) for aup in aups],
        "settings": settings,
    }
    with file_beside(folder / "plot.png") as path:
        draw_plot(rows, path, labels=labels)
    write_text(folder / "report.md", text)
    write_json(folder / REPORT, content)
    return text


def read_report(folder: Path) -> dict[str, Any]:
    """A finished sweep's `report.json`; `ValueError` if there is none."""
    path = folder / REPORT
    if not path.exists():
        raise ValueError(f"{folder} has no {REPORT}; run jobs/eval_sweep.py --out {folder}")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """A sweep's samples as rows of `GRADED_COLUMNS`."""
    for path in sorted((folder / "samples").glob("part-*.parquet")):
        yield from pq.read_table(path).to_pylist()
