"""The files of a report: Markdown, JSON, a page and the plot, as bytes that depend on the rows and settings alone."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mbd_core.evaluation.accuracy_gaps import AccuracyGap
from mbd_core.evaluation.endpoint_seconds import EndpointSeconds, seconds_lines
from mbd_core.evaluation.paper_tables import Own, beside_tables, paper_content, paper_lines
from mbd_core.evaluation.report_page import render_page
from mbd_core.evaluation.shown_samples import ShownSamples
from mbd_core.evaluation.speed import Speed
from mbd_core.evaluation.speed_gain import SpeedGain, speed_gains
from mbd_core.evaluation.sweep_markdown import render_markdown
from mbd_core.evaluation.sweep_report import AupMean, AupRow, ReportKey, ReportRow, token_efficiency
from mbd_core.evaluation.tradeoff_plot import draw_plot


def report_files(
    rows: Sequence[ReportRow],
    aups: Sequence[AupRow],
    aup_means: Sequence[AupMean],
    times: Sequence[Speed],
    shown: ShownSamples,
    *,
    gaps: Mapping[ReportKey, AccuracyGap],
    labels: Mapping[str, str],
    settings: Mapping[str, Any],
    seconds: Sequence[EndpointSeconds] = (),
) -> dict[str, bytes]:
    """The files by name, `report.json` last. `labels` maps task names to column heads.

    What was timed is in `times` and `papers` of `report.json` and in the last sections of `report.md`, and so of the
    page, from `Speed` on; all else is the same bytes for the same plan. `seconds` are those of endpoints.
    """
    gains = speed_gains(times, rows)
    papers = beside_tables(Own.of(rows, aups, times, aup_means))
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
        "aup_means": [asdict(one) for one in aup_means],
        "differences": [_gap_content(key, gap) for key, gap in gaps.items()],
        "settings": settings,
        "times": [
            {**asdict(speed), "config": json.loads(speed.config), "gain": _gain(speed, gains)} for speed in times
        ],
        "papers": paper_content(papers),
        **({"endpoint_seconds": [asdict(one) for one in seconds]} if seconds else {}),
    }
    plot = io.BytesIO()
    draw_plot(rows, plot, labels=labels)
    text = render_markdown(rows, aups, times, labels=labels, settings=settings, aup_means=aup_means, gaps=gaps)
    text += "".join(f"{line}\n" for line in seconds_lines(seconds, labels))
    text += "\n".join([*paper_lines(papers, recipe=_recipes(settings)), ""])
    return {
        "plot.png": plot.getvalue(),
        "report.md": text.encode(),
        "report.html": render_page(text, rows, shown, labels=labels, settings=settings),
        "report.json": (json.dumps(content, indent=2, allow_nan=False) + "\n").encode(),
    }


def _gap_content(key: ReportKey, gap: AccuracyGap) -> dict[str, Any]:
    subject, base = ({**asdict(one), "config": json.loads(one.config)} for one in (key, gap.baseline))
    return {**subject, **asdict(gap), "baseline": base}


def _gain(speed: Speed, gains: Mapping[ReportKey, SpeedGain]) -> dict[str, Any] | None:
    gain = gains.get(ReportKey(speed.model, speed.method, speed.task, speed.config))
    return None if gain is None else asdict(gain)


def _recipes(settings: Mapping[str, Any]) -> str:
    """How the problems were asked, in words; of joined sweeps, how those of each were."""
    parts = [settings, *(value for value in settings.values() if isinstance(value, Mapping))]
    names = dict.fromkeys(str(part["recipe"]) for part in parts if "recipe" in part)
    return "; ".join(names) or "as the settings say"
