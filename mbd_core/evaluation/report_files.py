"""The files of a report: Markdown, JSON and the plot, as bytes that depend on the rows and settings alone."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mbd_core.evaluation.endpoint_seconds import EndpointSeconds, seconds_lines
from mbd_core.evaluation.speed import Speed
from mbd_core.evaluation.speed_gain import SpeedGain, speed_gains
from mbd_core.evaluation.sweep_markdown import render_markdown
from mbd_core.evaluation.sweep_report import AupRow, ReportKey, ReportRow, token_efficiency
from mbd_core.evaluation.tradeoff_plot import draw_plot


def report_files(
    rows: Sequence[ReportRow],
    aups: Sequence[AupRow],
    times: Sequence[Speed],
    *,
    labels: Mapping[str, str],
    settings: Mapping[str, Any],
    seconds: Sequence[EndpointSeconds] = (),
) -> dict[str, bytes]:
    """The files by name, `report.json` last. `labels` maps task names to column heads.

    What was timed is in `times` of `report.json` and in the last section of `report.md`; all else is the same bytes
    for the same plan. `seconds` are those of endpoints.
    """
    gains = speed_gains(times, rows)
    content = {
        "rows": [
            {
                "model": row.key.model,
                "method": row.key.method,
                "task": row.key.task,
                "config": json.loads(row.key.config),
                **asdict(row.summary),
                "token_efficiency": token_efficiency(row),
            }
            for row in rows
        ],
        "aup": [asdict(aup) for aup in aups],
        "settings": settings,
        "times": [
            {**asdict(speed), "config": json.loads(speed.config), "gain": _gain(speed, gains)} for speed in times
        ],
        **({"endpoint_seconds": [asdict(one) for one in seconds]} if seconds else {}),
    }
    markdown = render_markdown(rows, aups, times, labels=labels, settings=settings)
    plot = io.BytesIO()
    draw_plot(rows, plot, labels=labels)
    return {
        "plot.png": plot.getvalue(),
        "report.md": "".join([markdown, *(f"{line}\n" for line in seconds_lines(seconds, labels))]).encode(),
        "report.json": (json.dumps(content, indent=2, allow_nan=False) + "\n").encode(),
    }


def _gain(speed: Speed, gains: Mapping[ReportKey, SpeedGain]) -> dict[str, Any] | None:
    gain = gains.get(ReportKey(speed.model, speed.method, speed.task, speed.config))
    return None if gain is None else asdict(gain)
