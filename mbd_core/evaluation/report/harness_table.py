"""The metrics of lm-evaluation-harness's tasks and groups for every configuration, aggregated by the harness."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mbd_core.evaluation.measures.summary import ReportKey
from mbd_core.evaluation.report.metrics import SUBJECT
from mbd_core.evaluation.sweep.folder import read_samples
from mbd_core.evaluation.tasks.kinds.harness import HARNESS_PREFIX, Metrics, aggregate, aggregate_groups, group_tasks
from mbd_core.tables import Table

COLUMNS = ("sample", "model", "method", "task", "config", "reference", "detail", "text")


@dataclass(frozen=True, kw_only=True)
class HarnessNumbers:
    """The metrics of a configuration over its graded answers; other answers were not decoded or not graded."""

    num_graded: int
    num_answers: int
    metrics: Metrics


def harness_numbers(folders: Sequence[Path], keys: Sequence[ReportKey]) -> dict[ReportKey, HarnessNumbers]:
    """The numbers of the harness's tasks among `keys`, and of the groups that the sweeps named. The groups' keys are
    not in `keys`. A sample that two folders hold counts once."""
    if not any(key.task.startswith(HARNESS_PREFIX) for key in keys):
        return {}
    rows = {
        (ReportKey(row["model"], row["method"], row["task"], row["config"]), row["reference"], row["sample"]): row
        for folder in folders
        for row in read_samples(folder, columns=COLUMNS)
        if row["task"].startswith(HARNESS_PREFIX)
    }
    numbers: dict[ReportKey, HarnessNumbers] = {}
    groups: dict[tuple[str, str | None], None] = {}
    for key in keys:
        answers = [row for (subject, _, _), row in sorted(rows.items(), key=lambda item: item[0][2]) if subject == key]
        grades = [json.loads(detail) for row in answers if (detail := row["detail"] or "").startswith("{")]
        if grades:
            reference = json.loads(answers[0]["reference"])
            include = reference["include"]
            groups |= dict.fromkeys((group, include) for group in reference.get("groups", ()))
            numbers[key] = HarnessNumbers(
                num_graded=len(grades), num_answers=len(answers), metrics=aggregate(key.task, include, grades)
            )
    return numbers | _group_numbers(numbers, list(groups))


def _group_numbers(
    numbers: Mapping[ReportKey, HarnessNumbers], groups: Sequence[tuple[str, str | None]]
) -> dict[ReportKey, HarnessNumbers]:
    group_numbers = {}
    for variant in dict.fromkeys((key.model, key.method, key.config) for key in numbers):
        tasks = {
            key.task.removeprefix(HARNESS_PREFIX): task_numbers
            for key, task_numbers in numbers.items()
            if (key.model, key.method, key.config) == variant
        }
        for name, include in groups:
            averages = aggregate_groups(
                name,
                include,
                {task: (task_numbers.metrics, task_numbers.num_graded) for task, task_numbers in tasks.items()},
            )
            for group, metrics in averages.items():
                members = [tasks[task] for task in group_tasks(name, group, include) if task in tasks]
                model, method, config = variant
                group_numbers[ReportKey(model, method, f"{HARNESS_PREFIX}{group}", config)] = HarnessNumbers(
                    num_graded=sum(task_numbers.num_graded for task_numbers in members),
                    num_answers=sum(task_numbers.num_answers for task_numbers in members),
                    metrics=metrics,
                )
    return group_numbers


def harness_table(
    numbers: Mapping[ReportKey, HarnessNumbers], labels: Mapping[str, str], varied: Mapping[ReportKey, str]
) -> Table:
    """A row for each metric and filter; `varied` has the settings in which configurations differ."""
    settings = {(key.model, key.method, key.config): text for key, text in varied.items()}
    return Table(
        title="lm-evaluation-harness's metrics",
        columns=(*SUBJECT, "Answers", "Filter", "Metric", "Value"),
        numeric=(4, 7),
        rows=[
            (
                *(key.model, key.method, labels.get(key.task, key.task.removeprefix(HARNESS_PREFIX))),
                settings[key.model, key.method, key.config] or None,
                *(f"{task_numbers.num_graded} of {task_numbers.num_answers}", filter_name, metric, f"{value:.4f}"),
            )
            for key, task_numbers in numbers.items()
            for filter_name, metrics in task_numbers.metrics.items()
            for metric, value in metrics.items()
        ],
        notes=(
            "By the task's own filters, metrics and aggregation, over the answers that were decoded and graded; of a "
            "group, the average that it defines. Acc of the other tables is the share of answers with full marks by "
            "acc, acc_norm, or else the first metric, of the first filter.",
        ),
    )
