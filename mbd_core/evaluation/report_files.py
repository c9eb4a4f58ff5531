"""The files of a report: Markdown, JSON and the plot, as bytes that depend on the rows and settings alone."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mbd_core.evaluation.sweep_markdown import render_markdown
from mbd_core.evaluation.sweep_report import AupRow, ReportRow
from mbd_core.evaluation.tradeoff_plot import draw_plot

TIMES = ("tps", "decode_seconds")  # the fields of a row that differ from run to run; all others follow from the plan


def report_files(
    rows: Sequence[ReportRow], aups: Sequence[AupRow], *, labels: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files by name, `report.json` last. `labels` maps task names to column heads."""
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
        "times": [f"rows.{name}" for name in TIMES],
    }
    plot = io.BytesIO()
    draw_plot(rows, plot, labels=labels)
    return {
        "plot.png": plot.getvalue(),
        "report.md": render_markdown(rows, aups, labels=labels, settings=settings).encode(),
        "report.json": (json.dumps(content, indent=2, allow_nan=False) + "\n").encode(),
    }
