"""A report's contents: the numbers of sweeps, their tables, and the bytes of their files."""

import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mbd_core.evaluation.measures.repeated import Repeated
from mbd_core.evaluation.measures.speed import MeasuredSpeed
from mbd_core.evaluation.measures.summary import (
    AupMean,
    AupRow,
    ReportKey,
    ReportRow,
    token_efficiency,
)
from mbd_core.evaluation.report.accuracy_gaps import AccuracyGap, gap_table
from mbd_core.evaluation.report.harness_table import HarnessNumbers, harness_table
from mbd_core.evaluation.report.metrics import metric_table
from mbd_core.evaluation.report.page import render_page
from mbd_core.evaluation.report.paper_tables import Own, beside_tables, paper_content, paper_section
from mbd_core.evaluation.report.shown_samples import ShownSamples
from mbd_core.evaluation.report.speeds import (
    EndpointSeconds,
    gain_table,
    key_of,
    seconds_table,
    speed_gains,
    speed_table,
)
from mbd_core.evaluation.report.tables import (
    aup_table,
    best_table,
    configuration_table,
    draft_table,
    repeated_table,
    rule_table,
    settings_table,
)
from mbd_core.evaluation.report.tradeoff_plot import draw_plot
from mbd_core.tables import Table, markdown


@dataclass(frozen=True, kw_only=True)
class SweepNumbers:
    """The numbers of a report's sweeps, and the words for them.

    labels    column heads by task
    settings  the facts that a reader needs to judge the numbers
    times     the speeds of timed configurations
    seconds   the seconds of endpoints' answers
    harness   metrics of lm-evaluation-harness's tasks, and of the groups asked for
    """

    rows: Sequence[ReportRow]
    labels: Mapping[str, str]
    settings: Mapping[str, Any]
    aups: Sequence[AupRow] = ()
    aup_means: Sequence[AupMean] = ()
    times: Sequence[MeasuredSpeed] = ()
    gaps: Mapping[ReportKey, AccuracyGap] = field(default_factory=dict)
    seconds: Sequence[EndpointSeconds] = ()
    repeated: Mapping[ReportKey, Repeated] = field(default_factory=dict)
    harness: Mapping[ReportKey, HarnessNumbers] = field(default_factory=dict)


def report_tables(numbers: SweepNumbers) -> list[Table]:
    """The report as tables, in their order."""
    rows, labels = numbers.rows, numbers.labels
    varied = {row.key: row.varied for row in rows}
    gains = speed_gains(numbers.times, rows)
    papers = beside_tables(Own.of(rows, numbers.aups, numbers.times, numbers.aup_means))
    tables = [
        best_table(rows, numbers.aup_means, labels, title="Evaluation sweep"),
        configuration_table(rows, labels),
        draft_table(rows, labels),
        rule_table(rows, labels),
        repeated_table(numbers.repeated, labels, varied) if numbers.repeated else None,
        harness_table(numbers.harness, labels, varied) if numbers.harness else None,
        aup_table(numbers.aups, labels),
        gap_table(numbers.gaps, labels, varied) if numbers.gaps else None,
        metric_table(),
        settings_table(numbers.settings),
        speed_table(numbers.times, labels, varied) if numbers.times else None,
        gain_table(gains, labels, varied) if gains else None,
        seconds_table(numbers.seconds, labels) if numbers.seconds else None,
        *paper_section(papers, recipe=_recipes(numbers.settings)),
    ]
    return [table for table in tables if table is not None]


def _recipes(settings: Mapping[str, Any]) -> str:
    """How the problems were asked, in words: the different recipes of all joined sweeps."""
    parts = [settings, *(value for value in settings.values() if isinstance(value, Mapping))]
    names = dict.fromkeys(str(part["recipe"]) for part in parts if "recipe" in part)
    return "; ".join(names) or "as the settings say"


def report_files(numbers: SweepNumbers, tables: Sequence[Table], shown: ShownSamples) -> dict[str, bytes]:
    """The files by name, `report.json` last; `tables` come from `report_tables`.

    Times stand in `times` and `papers` of `report.json`, and in the last sections of `report.md` and the page, from
    `Speed` on. All other bytes are the same for the same plan.
    """
    rows, labels, settings = numbers.rows, numbers.labels, numbers.settings
    gains = speed_gains(numbers.times, rows)
    papers = beside_tables(Own.of(rows, numbers.aups, numbers.times, numbers.aup_means))
    repeated_here = {row.key: numbers.repeated[row.key] for row in rows if row.key in numbers.repeated}
    content = {
        "rows": [
            {
                "model": row.key.model,
                "method": row.key.method,
                "task": row.key.task,
                "config": json.loads(row.key.config),
                **asdict(row.summary),
                "by_rule": {
                    rule: {"accuracy": value.value, "low": value.low, "high": value.high}
                    for rule, value in row.summary.by_rule.items()
                },
                "token_efficiency": token_efficiency(row),
                **(asdict(repeated_here[row.key]) if row.key in repeated_here else {}),
                **({"harness": asdict(numbers.harness[row.key])} if row.key in numbers.harness else {}),
            }
            for row in rows
        ],
        **_groups_content(numbers.harness, {row.key for row in rows}),
        "aup": [_aup_content(aup) for aup in numbers.aups],
        "aup_means": [_aup_content(value) for value in numbers.aup_means],
        "differences": [_gap_content(key, gap) for key, gap in numbers.gaps.items()],
        "settings": settings,
        "times": [
            {
                **asdict(speed),
                "config": json.loads(speed.config),
                "gain": asdict(gains[key_of(speed)]) if key_of(speed) in gains else None,
            }
            for speed in numbers.times
        ],
        "papers": paper_content(papers),
        **({"endpoint_seconds": [asdict(value) for value in numbers.seconds]} if numbers.seconds else {}),
    }
    plot = io.BytesIO()
    draw_plot(rows, plot, labels=labels)
    return {
        "plot.png": plot.getvalue(),
        "report.md": markdown(tables).encode(),
        "report.html": render_page(tables, rows, shown, labels=labels, settings=settings),
        "report.json": (json.dumps(content, indent=2, allow_nan=False) + "\n").encode(),
    }


def _groups_content(harness: Mapping[ReportKey, HarnessNumbers], keys: Collection[ReportKey]) -> dict[str, Any]:
    """The averages of lm-evaluation-harness's groups, if any were requested."""
    groups = [
        {
            "model": key.model,
            "method": key.method,
            "group": key.task,
            "config": json.loads(key.config),
            **asdict(group_numbers),
        }
        for key, group_numbers in harness.items()
        if key not in keys
    ]
    return {"harness_groups": groups} if groups else {}


def _aup_content(aup: AupRow | AupMean) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in asdict(aup).items():
        if name in ("eq41", "d3llm"):
            content[f"aup_{name}"] = value["value"]
        else:
            content[name] = value
    for name, area in (("eq41", aup.eq41), ("d3llm", aup.d3llm)):
        content[f"{name}_interval"] = None if area.low is None else area.bounds
    return content


def _gap_content(key: ReportKey, gap: AccuracyGap) -> dict[str, Any]:
    subject, base = (
        {**asdict(key_of_side), "config": json.loads(key_of_side.config)} for key_of_side in (key, gap.baseline)
    )
    return {**subject, **asdict(gap), "baseline": base}
