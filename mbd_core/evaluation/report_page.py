"""A report as one HTML page that needs nothing but itself: the tables of `report.md`, accuracy over TPF, and samples.

The page is `report_page.html` with data inserted; it opens from file:// and loads nothing. All texts reach it as JSON
and become text nodes, so that nothing of a prompt or an answer is markup.
"""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mbd_core.decoding.speed_front import SpeedPoint, pareto_points
from mbd_core.evaluation.markdown_sections import markdown_sections
from mbd_core.evaluation.paper_tables import NOT_PRINTED
from mbd_core.evaluation.shown_samples import ShownSamples, page_json
from mbd_core.evaluation.sweep_report import ReportKey, ReportRow

TEMPLATE = Path(__file__).with_name("report_page.html")
SETTINGS = "What was run"  # the section whose content is `settings`, which are no Markdown on the page


def render_page(
    markdown: str,
    rows: Sequence[ReportRow],
    shown: ShownSamples,
    *,
    labels: Mapping[str, str],
    settings: Mapping[str, Any],
) -> bytes:
    """The page. `markdown` is the report as Markdown, `labels` maps task names to their heads."""
    models = list(dict.fromkeys(row.key.model for row in rows))
    title = f"Evaluation sweep: {', '.join(models)} on {', '.join(labels.values())}"
    front = {key for task in labels for key in front_of([row for row in rows if row.key.task == task])}
    data = {
        "title": title,
        "sections": [asdict(section) for section in markdown_sections(markdown) if section.heading != SETTINGS],
        "configurations": [_configuration(row, labels[row.key.task], on_front=row.key in front) for row in rows],
        "tasks": list(labels.values()),
        "settings": settings,
        "note": shown.note,
        "folded": NOT_PRINTED,
    }
    samples = ",".join(f"[{','.join(shown.samples.get(row.key, ()))}]" for row in rows)
    body = page_json(data).removesuffix("}") + f',"prompts":[{",".join(shown.prompts)}],"samples":[{samples}]}}'
    values = {"__TITLE__": html.escape(title), "__DATA__": body}
    parts = re.split("(__TITLE__|__DATA__)", TEMPLATE.read_text(encoding="utf-8"))
    return "".join(values.get(part, part) for part in parts).encode()


def front_of(rows: Sequence[ReportRow]) -> list[ReportKey]:
    """The rows of one task that no other row beats in accuracy or TPF without losing in the other; none of an endpoint
    that does not say its forwards."""
    points = (
        SpeedPoint(decoding={"row": number}, accuracy=row.summary.accuracy, tpf=row.summary.tpf)
        for number, row in enumerate(rows)
        if row.summary.tpf is not None
    )
    return [rows[point.decoding["row"]].key for point in pareto_points(points)]


def _configuration(row: ReportRow, label: str, *, on_front: bool) -> dict[str, Any]:
    """A point of a curve, and the head of its samples."""
    s = row.summary
    return {
        **{name: getattr(row.key, name) for name in ("model", "method", "config")},
        "task": label,
        "varied": row.varied,
        "front": on_front,
        **{name: getattr(s, name) for name in ("n", "tpf", "tpf_stderr", "nfe", "cut", "errors")},
        **{name: getattr(s, name) for name in ("accuracy", "accuracy_low", "accuracy_high")},
    }
