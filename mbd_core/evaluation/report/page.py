"""A report as one self-contained HTML page: tables, accuracy over TPF, and samples with their decoding.

The page is `page.html`, a Jinja template. It opens from file:// and loads nothing. Texts are escaped, or reach it as
JSON and become text nodes, so that nothing of a prompt or an answer is markup.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from mbd_core.decoding.blocks.methods import SpeedPoint, pareto_points
from mbd_core.evaluation.measures.summary import ReportKey, ReportRow
from mbd_core.evaluation.report.metrics import ACCURACY, NFE, TPF
from mbd_core.evaluation.report.shown_samples import ShownSamples
from mbd_core.evaluation.report.tables import SETTINGS
from mbd_core.tables import Table, anchor, cell_text, script_json

TEMPLATE = Path(__file__).with_name("page.html")
LONG = 48  # characters; a longer cell makes its column wide


def render_page(
    tables: Sequence[Table],
    rows: Sequence[ReportRow],
    shown: ShownSamples,
    *,
    labels: Mapping[str, str],
    settings: Mapping[str, Any],
) -> bytes:
    """The page. `labels` maps the names of tasks to their titles."""
    models = list(dict.fromkeys(row.key.model for row in rows))
    front = {key for task in labels for key in front_of([row for row in rows if row.key.task == task])}
    data = {
        "configurations": [_configuration(row, labels[row.key.task], on_front=row.key in front) for row in rows],
        "tasks": list(labels.values()),
        "axes": {metric.field: metric.axis for metric in (ACCURACY, TPF, NFE)},
    }
    samples = ",".join(f"[{','.join(shown.samples.get(row.key, ()))}]" for row in rows)
    body = script_json(data).removesuffix("}") + f',"prompts":[{",".join(shown.prompts)}],"samples":[{samples}]}}'
    first, *others = _sections([table for table in tables if table.title != SETTINGS])
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "anchor": anchor,
        "cell_text": cell_text,
        "cell_parts": lambda cell: re.split(r" (?=\[)", cell_text(cell)),
        "column_class": _column_class,
    }
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"Evaluation sweep: {', '.join(models)} on {', '.join(labels.values())}",
        sections=[first, *others],
        contents=[
            ("results", "Results"),
            ("curves", "Accuracy over tokens per forward"),
            *((section[0].anchor, section[0].title) for section in others),
            ("samples", "Samples"),
            ("settings", SETTINGS),
        ],
        settings=settings,
        note=shown.note,
        data=body,
    )
    return page.encode()


def _sections(tables: Sequence[Table]) -> list[list[Table]]:
    """The tables in groups; each group begins with a heading of level 1 or 2."""
    sections: list[list[Table]] = []
    for table in tables:
        if table.title and table.level <= 2:
            sections.append([])
        sections[-1].append(table)
    return sections


def _column_class(table: Table, column: int) -> str:
    if column in table.numeric:
        return "number"
    is_long = any(len(cell_text(row[column])) > LONG for row in table.rows if not table.is_group(row))
    return "long" if is_long else ""


def front_of(rows: Sequence[ReportRow]) -> list[ReportKey]:
    """The Pareto front of a task's rows in accuracy and TPF, without endpoints that do not report forwards."""
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
