"""The tables of a sweep's numbers: the layout of the paper's Table 1, every configuration, rules, and both AUPs."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mbd_core.evaluation.measures.aup import AupPoint
from mbd_core.evaluation.measures.rates import RULES, Summary
from mbd_core.evaluation.measures.repeated import Repeated
from mbd_core.evaluation.measures.statistics import NUM_DRAWS, mean, spread_of_mean
from mbd_core.evaluation.measures.summary import (
    AupMean,
    AupRow,
    ReportKey,
    ReportRow,
    best_row,
    token_efficiency,
)
from mbd_core.evaluation.report.metrics import ACCURACY, METRICS, NFE, SUBJECT, TPF
from mbd_core.tables import Cell, Table

SETTINGS = "What was run"
Varied = Mapping[ReportKey, str]

BEST_NOTE = (
    "Each row is a model and method, with its most accurate configuration on each task (on ties the one of higher "
    "TPF). The choice was made on these samples, so with many configurations the accuracies are biased upwards."
)


def best_table(
    rows: Sequence[ReportRow], aup_means: Sequence[AupMean], labels: Mapping[str, str], *, title: str
) -> Table:
    """The layout of the paper's Table 1, with averages where there are several tasks; the configurations below it."""
    areas = (METRICS["aup_eq41"], METRICS["aup"])
    of_tasks = [*labels.values(), *(["Average"] if len(labels) > 1 else [])]
    heads = [f"{label} {metric.arrow}" for label in of_tasks for metric in (ACCURACY, TPF)]
    heads += [f"{metric.name} [95 %] {metric.better}" for metric in areas]
    table_rows: list[Sequence[Cell]] = []
    configurations: list[str] = []
    tasks_of_areas = {task for area in aup_means for task in area.tasks}
    for model in dict.fromkeys(row.key.model for row in rows):
        sizes = dict.fromkeys(row.config.get("block_size") for row in rows if row.key.model == model)
        blocks = ["an endpoint" if size is None else f"blksz={size}" for size in sizes]
        table_rows.append([f"{model} ({', '.join(blocks)})"])
        for method in dict.fromkeys(row.key.method for row in rows if row.key.model == model):
            best = {
                task: best_row(of_task)
                for task in labels
                if (of_task := [row for row in rows if _subject(row) == (model, method, task)])
            }
            cells = [cell for task in labels for cell in _pair(best.get(task))]
            if len(labels) > 1:
                summaries = [row.summary for row in best.values()]
                has_all = len(best) == len(labels)
                cells += [_mean_accuracy_text(summaries), _mean_tpf_text(summaries)] if has_all else [None, None]
            aup = next((area for area in aup_means if (area.model, area.method) == (model, method)), None)
            has_all = aup is not None and tasks_of_areas <= {*aup.tasks}
            cells += [aup.eq41.text(), aup.d3llm.text()] if aup is not None and has_all else [None, None]
            table_rows.append([method, *cells])
            varied = "; ".join(f"{labels[task]}: {row.varied or 'the only one'}" for task, row in best.items())
            configurations.append(f"{model}, {method}: {varied}")
    return Table(
        title=title,
        level=1,
        brief=True,
        lead=(BEST_NOTE,),
        see="What the numbers are",
        columns=("Model", *heads),
        numeric=range(1, 1 + len(heads)),
        rows=table_rows,
        notes=("Configuration of each table row:", configurations),
    )


def _subject(row: ReportRow) -> tuple[str, str, str]:
    return (row.key.model, row.key.method, row.key.task)


def _pair(row: ReportRow | None) -> tuple[str | None, str | None]:
    """Accuracy and TPF; `None` where the method has no sample of the task, as in a shard."""
    return (None, None) if row is None else (accuracy_text(row.summary), TPF.text(row.summary.tpf))


def _mean_tpf_text(summaries: Sequence[Summary]) -> str:
    """The mean TPF; a dash if there is no summary, or if a TPF is unknown."""
    values = [s.tpf for s in summaries if s.tpf is not None]
    return TPF.text(mean(values) if values and len(values) == len(summaries) else None)


def _mean_accuracy_text(summaries: Sequence[Summary]) -> str:
    """The mean accuracy; its interval combines the tasks' intervals as independent."""
    center = mean([s.accuracy for s in summaries])
    half_below = spread_of_mean([s.accuracy - s.accuracy_low for s in summaries])
    half_above = spread_of_mean([s.accuracy_high - s.accuracy for s in summaries])
    return f"{center:.2f} [{center - half_below:.1f}, {center + half_above:.1f}]"


def accuracy_text(summary: Summary) -> str:
    """The accuracy with its interval."""
    return f"{summary.accuracy:.2f} [{summary.accuracy_low:.1f}, {summary.accuracy_high:.1f}]"


def configuration_table(rows: Sequence[ReportRow], labels: Mapping[str, str]) -> Table:
    sums, efficiency, positions = (METRICS[name] for name in ("tpf_sums", "token_efficiency", "positions"))
    cut, errors = METRICS["cut"], METRICS["errors"]
    heads = ("n", f"{ACCURACY.name} [95 %]", f"{TPF.name} ± se")
    return Table(
        title="Every configuration",
        brief=True,
        columns=(*SUBJECT, *heads, *(metric.name for metric in (sums, efficiency, NFE, positions, cut, errors))),
        numeric=range(4, 13),
        rows=[
            (
                *(row.key.model, row.key.method, labels[row.key.task], row.varied or None, s.n, accuracy_text(s)),
                *(f"{TPF.text(s.tpf)} ± {TPF.text(s.tpf_stderr)}", sums.text(s.tpf_ratio_of_sums)),
                *(efficiency.text(token_efficiency(row)), NFE.text(s.nfe), positions.text(s.positions)),
                *(s.cut, s.errors),
            )
            for row in rows
            for s in [row.summary]
        ],
    )


DRAFT_DEFINITIONS = (
    "Judged: drafted tokens that a verification compared with the model at block size 1. Confirmed: judged "
    "tokens that it accepted. Refused or after: drafted tokens that the verification replaced by its own, or did not "
    "reach. Useful tokens that were not confirmed are the verification's own tokens, or drafted tokens that were "
    "accepted by confidence."
)


def draft_table(rows: Sequence[ReportRow], labels: Mapping[str, str]) -> Table | None:
    """Drafted, confirmed and refused tokens; `None` where no draft was judged."""
    judged = [(row, row.summary) for row in rows if row.summary.num_drafted_tokens]
    if not judged:
        return None
    return Table(
        title="Drafts and their verification",
        columns=(*SUBJECT, "Judged", "Confirmed", "Refused or after", "Confirmed share", "Confirmed a forward"),
        numeric=range(4, 9),
        rows=[
            (
                *(row.key.model, row.key.method, labels[row.key.task], row.varied or None),
                *_draft_cells(s.num_drafted_tokens or 0, s.num_confirmed_tokens or 0, s.num_forwards or 0),
            )
            for row, s in judged
        ],
        notes=(DRAFT_DEFINITIONS,),
    )


def _draft_cells(drafted: int, confirmed: int, forwards: int) -> tuple[Cell, ...]:
    per_forward = f"{confirmed / forwards:.2f}" if forwards else None
    return drafted, confirmed, drafted - confirmed, f"{100 * confirmed / drafted:.1f} %", per_forward


RULE_DEFINITIONS = (
    "Percent right with the 95 % Wilson interval; a dash if the task has no such rule, or the rule judged nothing. "
    "Strict: the answer stands where the task wants it, after its mark or in \\boxed. Flexible: the answer is found "
    "anywhere (in the project's own tasks the last number, else by math-verify). Base: the program passes the "
    "benchmark's own inputs. Plus: these and EvalPlus's further inputs. Acc of the other tables is flexible for GSM8K "
    "and MATH, strict for the project's own tasks, and plus for EvalPlus's. A sample that was not judged is wrong."
)


def rule_table(rows: Sequence[ReportRow], labels: Mapping[str, str]) -> Table | None:
    """Accuracies by rule; `None` where no rule but the task's own judged a sample."""
    judged = [row for row in rows if row.summary.by_rule]
    rules = [rule for rule in RULES if any(rule in row.summary.by_rule for row in judged)]
    if not rules:
        return None
    return Table(
        title="Accuracy by rule",
        columns=(*SUBJECT, "n", *(f"{rule.capitalize()} [95 %]" for rule in rules)),
        numeric=range(4, 5 + len(rules)),
        rows=[
            (
                *(row.key.model, row.key.method, labels[row.key.task], row.varied or None, row.summary.n),
                *(rate and rate.text(bounds=".1f") for rate in map(row.summary.by_rule.get, rules)),
            )
            for row in judged
        ],
        notes=(RULE_DEFINITIONS,),
    )


REPEATED_DEFINITIONS = (
    "pass@k: the chance that one of k answers to a problem is right, by the unbiased estimator (Chen et al. 2021). "
    "maj@k: the chance that the answer with the most votes among k is right; answers that the grader takes as equal "
    "count as one answer, and tied answers share. A program has no vote. [95 %], of Acc here too: percentiles of "
    "2,000 draws of problems, each with all its answers (cluster bootstrap)."
)


def repeated_table(repeated: Mapping[ReportKey, Repeated], labels: Mapping[str, str], varied: Varied) -> Table:
    """pass@k and maj@k; `varied` has the settings in which configurations differ."""
    sizes = sorted({k for rates in repeated.values() for k in rates.pass_at})
    has_votes = any(rates.maj_at for rates in repeated.values())
    heads = ["Problems", "Answers each", *(f"pass@{k} [95 %]" for k in sizes)]
    heads += [f"maj@{k} [95 %]" for k in sizes if has_votes]
    return Table(
        title="Several answers to a problem",
        brief=True,
        columns=(*SUBJECT, *heads),
        numeric=range(4, 4 + len(heads)),
        rows=[
            (
                *(key.model, key.method, labels[key.task], varied[key] or None, rates.num_problems, rates.num_samples),
                *(rate and rate.text(bounds=".1f") for rate in map(rates.pass_at.get, sizes)),
                *(rate and rate.text(bounds=".1f") for rate in map(rates.maj_at.get, sizes if has_votes else ())),
            )
            for key, rates in repeated.items()
        ],
        notes=(REPEATED_DEFINITIONS,),
    )


AUP_CAPTION = (
    "d3LLM's AUP weighs an accuracy by y_max, the best accuracy in its pool: all configurations of this report on the "
    "task. y_max moves with the pool. The anchor is the first point: up to it the area is a rectangle without weight, "
    "and no point is added at TPF 1. [95 %]: percentiles of a bootstrap over the task's problems, with "
    f"{NUM_DRAWS:,} draws, the same for all configurations; each draw has its own points, y_max and dropped points. A "
    "single problem has no interval. If no answer differs, the interval has no width, which is no certainty."
)


def aup_table(aups: Sequence[AupRow], labels: Mapping[str, str]) -> Table:
    """One row per AUP curve; under the curve of all buffer sizes stand the curves of each size."""
    order = {key: number for number, key in enumerate(dict.fromkeys((a.model, a.method, a.task) for a in aups))}
    aups = sorted(aups, key=lambda a: (order[a.model, a.method, a.task], a.slots or 0))
    slots = ["Slots"] if any(a.slots is not None for a in aups) else []
    return Table(
        title="AUP by task, with its points",
        columns=(*SUBJECT[:3], *slots, "Eq. 4.1 [95 %]", "d3LLM [95 %]", "Points (TPF, Acc)", "Dropped by d3LLM"),
        numeric=range(3, 5 + len(slots)),
        rows=[
            (
                *(a.model, a.method, labels[a.task], *(["all" if a.slots is None else a.slots] if slots else [])),
                *(a.eq41.text(), a.d3llm.text()),
                *(_point_list(a.points), _point_list(a.dropped) or "none"),
            )
            for a in aups
        ],
        notes=(list(dict.fromkeys(f"{labels[a.task]}: {_y_max_text(a)}" for a in aups)), AUP_CAPTION),
    )


def _y_max_text(aup: AupRow) -> str:
    pool = "; ".join(aup.y_max_pool)
    return f"y_max {aup.y_max:.2f}, of {aup.y_max_of}; its pool (number of configurations): {pool}"


def _point_list(points: Iterable[AupPoint]) -> str:
    return " ".join(f"({p:.2f}, {y:.2f})" for p, y in points)


JSON_KEEPS = "\x85\u2028\u2029"  # ends of lines that JSON leaves as they are
MARKS = f"`<\n\r\v\f\x1c\x1d\x1e{JSON_KEEPS}"


def settings_table(settings: Mapping[str, Any]) -> Table:
    items = [f"{_setting_text(name)}: {_setting_text(value)}" for name, value in settings.items()]
    return Table(title=SETTINGS, lead=(items,))


def _setting_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_setting_text(name)} {_setting_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_setting_text(inner) for inner in value)
    text = str(value)
    return _code_span(text) if any(mark in text for mark in MARKS) else text


def _code_span(text: str) -> str:
    """The text on one line, as JSON, between more backticks than it holds in a row, so that none of it is Markdown."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    content = json.dumps(text, ensure_ascii=False)
    for mark in JSON_KEEPS:
        content = content.replace(mark, f"\\u{ord(mark):04x}")
    return f"{fence} {content} {fence}"
