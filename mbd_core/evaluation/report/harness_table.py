"""The metrics of lm-evaluation-harness's tasks, aggregated by the tasks' own rules, of every configuration."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mbd_core.evaluation.measures.summary import ReportKey
from mbd_core.evaluation.report.metrics import SUBJECT
from mbd_core.evaluation.sweep.folder import read_samples
from mbd_core.evaluation.tasks.benchmarks import HARNESS_PREFIX
from mbd_core.evaluation.tasks.harness_tasks import Metrics, aggregate
from mbd_core.tables import Table

COLUMNS = ("sample", "model", "method", "task", "config", "reference", "detail", "text")


@dataclass(frozen=True, kw_only=True)
class HarnessNumbers:
    """The metrics of a configuration over its graded answers; the others were not decoded or not graded."""

    num_graded: int
    num_answers: int
    metrics: Metrics


def harness_numbers(folders: Sequence[Path], keys: Sequence[ReportKey]) -> dict[ReportKey, HarnessNumbers]:
    """The numbers of the harness's tasks among the configurations; a sample that two folders hold counts once."""
    if not any(key.task.startswith(HARNESS_PREFIX) for key in keys):
        return {}
    rows = {
        (ReportKey(row["model"], row["method"], row["task"], row["config"]), row["reference"], row["sample"]): row
        for folder in folders
        for row in read_samples(folder, columns=COLUMNS)
        if row["task"].startswith(HARNESS_PREFIX)
    }
    found = {}
    for key in keys:
        own = [row for (subject, _, _), row in sorted(rows.items(), key=lambda one: one[0][2]) if subject == key]
        graded = [json.loads(row["detail"]) for row in own if (row["detail"] or "").startswith("{")]
        if graded:
            include = json.loads(own[0]["reference"])["include"]
            found[key] = HarnessNumbers(
                num_graded=len(graded), num_answers=len(own), metrics=aggregate(key.task, include, graded)
            )
    return found


def harness_table(
    numbers: Mapping[ReportKey, HarnessNumbers], labels: Mapping[str, str], varied: Mapping[ReportKey, str]
) -> Table:
    """A row for each metric and filter; `varied` has the settings in which configurations differ."""
    return Table(
        title="lm-evaluation-harness's metrics",
        columns=(*SUBJECT, "Answers", "Filter", "Metric", "Value"),
        numeric=(4, 7),
        rows=[
            (
                *(key.model, key.method, labels[key.task], varied[key] or None),
                *(f"{one.num_graded} of {one.num_answers}", by, metric, f"{value:.4f}"),
            )
            for key, one in numbers.items()
            for by, metrics in one.metrics.items()
            for metric, value in metrics.items()
        ],
        notes=(
            "By the task's own filters, metrics and aggregation, over the answers that were decoded and graded. Acc "
            "of the other tables is the share of answers with full marks by the first metric of the first filter.",
        ),
    )
