"""A sweep's report as Markdown: the layout of the paper's Table 1, then every configuration and both AUPs."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mbd_core.evaluation.measures.aup import AupPoint
from mbd_core.evaluation.measures.rates import Summary
from mbd_core.evaluation.measures.statistics import NUM_DRAWS, mean, spread_of_mean
from mbd_core.evaluation.measures.summary import (
    AupMean,
    AupRow,
    ReportKey,
    ReportRow,
    best_row,
    token_efficiency,
)
from mbd_core.evaluation.report.comparisons import AccuracyGap, gap_lines
from mbd_core.evaluation.report.sections import one_line, table_line
from mbd_core.evaluation.report.tables import gain_lines, rule_lines, speed_gains, speed_lines
from mbd_core.evaluation.sweep.timed_runs import Speed

CAPTION = (
    "Accuracy (Acc, percent, with its 95 % Wilson interval) and tokens per forward (TPF, mean over samples). Each "
    "pair of cells shows the row's configuration with the best accuracy on that task, on ties the higher TPF. It was "
    "chosen on the samples that it is reported on, so with many configurations the accuracies are biased upwards. "
    "Average columns are means over the tasks; the interval of an average accuracy combines those of the tasks, as of "
    "independent ones, which tasks of the same problems (HumanEval and HumanEval+) are not. AUP "
    "covers all configurations of the row for each task, then the mean over tasks: Eq. 4.1 is the trapezoid (0 with a "
    "single configuration), d3LLM's adds the first rectangle and weights (no point at TPF 1). Its [95 %] are "
    "percentiles of a bootstrap over the problems, of the mean over tasks those of the mean of their draws."
)

AUP_CAPTION = (
    "y_max, by which d3LLM's AUP weighs an accuracy, is the best accuracy in its pool: all configurations of this "
    "report on the task. It moves with the pool. The anchor, up to which that area is a rectangle without weight, is "
    "the first point; no point is added at TPF 1. [95 %]: percentiles of a bootstrap over the task's problems, with "
    f"{NUM_DRAWS:,} draws, the same for all configurations; points, y_max and what is dropped are those of each draw. "
    "A single problem has none, and where no answer differs a bootstrap has no width, which is no certainty."
)

JSON_KEEPS = "\x85\u2028\u2029"  # ends of lines that JSON leaves as they are
MARKS = f"`<\n\r\v\f\x1c\x1d\x1e{JSON_KEEPS}"


def render_markdown(
    rows: Sequence[ReportRow],
    aups: Sequence[AupRow],
    times: Sequence[Speed],
    *,
    labels: Mapping[str, str],
    settings: Mapping[str, Any],
    aup_means: Sequence[AupMean] = (),
    gaps: Mapping[ReportKey, AccuracyGap] | None = None,
) -> str:
    """The report as Markdown. `labels` maps task names to column heads, in column order."""
    varied = {row.key: row.varied for row in rows}
    lines = ["# Evaluation sweep", "", CAPTION, ""]
    lines += _best_lines(rows, aup_means, labels)
    lines += _configuration_lines(rows, labels)
    lines += rule_lines(rows, labels)
    lines += _aup_lines(aups, labels)
    lines += gap_lines(gaps or {}, labels, varied)
    lines += ["## What was run", ""]
    lines += [f"- {_setting_text(name)}: {_setting_text(value)}" for name, value in settings.items()]
    if times:
        lines += speed_lines(times, labels, varied) + gain_lines(speed_gains(times, rows), labels, varied)
    return "\n".join(lines) + "\n"


def _best_lines(rows: Sequence[ReportRow], aup_means: Sequence[AupMean], labels: Mapping[str, str]) -> list[str]:
    """The table of each method's best configuration, and a list of these configurations."""
    heads = [f"{label} {what}" for label in labels.values() for what in ("Acc ↑", "TPF ↑")]
    heads += ["Average Acc ↑", "Average TPF ↑", "AUP Eq. 4.1 [95 %] ↑", "AUP d3LLM [95 %] ↑"]
    lines = ["| Model | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    configurations: list[str] = []
    for model, block_size in dict.fromkeys((row.key.model, row.config.get("block_size")) for row in rows):
        blocks = "an endpoint" if block_size is None else f"blksz={block_size}"
        lines.append(table_line([f"*{model} ({blocks})*"]) + " |" * len(heads))
        for method in dict.fromkeys(row.key.method for row in rows if row.key.model == model):
            best = {
                task: best_row(of_task)
                for task in labels
                if (of_task := [row for row in rows if _subject(row) == (model, method, task)])
            }
            summaries = [row.summary for row in best.values()]
            aup = next((one for one in aup_means if (one.model, one.method) == (model, method)), None)
            cells = [cell for task in labels for cell in _pair(best.get(task))]
            cells += [_mean_accuracy_text(summaries), _mean_text([s.tpf for s in summaries])]
            cells += ["-", "-"] if aup is None else [aup.eq41.text(), aup.d3llm.text()]
            lines.append(table_line([method, *cells]))
            varied = "; ".join(f"{labels[task]}: {row.varied or 'the only one'}" for task, row in best.items())
            configurations.append(one_line(f"- {model}, {method}: {varied}"))
    return [*lines, "", "Configuration of each table row:", "", *configurations, ""]


def _subject(row: ReportRow) -> tuple[str, str, str]:
    return (row.key.model, row.key.method, row.key.task)


def _pair(row: ReportRow | None) -> tuple[str, str]:
    """Accuracy and TPF; a dash where the method has no sample of the task, as in a shard."""
    return ("-", "-") if row is None else (accuracy_text(row.summary), _number(row.summary.tpf))


def _mean_text(values: Sequence[float | None]) -> str:
    """The mean; a dash where there is nothing, or something is not known."""
    known = [value for value in values if value is not None]
    return f"{mean(known):.2f}" if known and len(known) == len(values) else "-"


def _mean_accuracy_text(summaries: Sequence[Summary]) -> str:
    """The mean accuracy; its interval combines those of the tasks, as of independent numbers."""
    center = mean([s.accuracy for s in summaries])
    below = spread_of_mean([s.accuracy - s.accuracy_low for s in summaries])
    above = spread_of_mean([s.accuracy_high - s.accuracy for s in summaries])
    return f"{center:.2f} [{center - below:.1f}, {center + above:.1f}]"


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def accuracy_text(summary: Summary) -> str:
    """The accuracy with its interval."""
    return f"{summary.accuracy:.2f} [{summary.accuracy_low:.1f}, {summary.accuracy_high:.1f}]"


def _configuration_lines(rows: Sequence[ReportRow], labels: Mapping[str, str]) -> list[str]:
    lines = ["## Every configuration", ""]
    lines.append(
        "| Model | Method | Task | Config | n | Acc [95 %] | TPF ± se | TPF (sums) | η_tok | NFE | Cut | Errors |"
    )
    lines.append("|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        k, s = row.key, row.summary
        cells = [k.model, k.method, labels[k.task], row.varied or "-", s.n, accuracy_text(s)]
        cells += [f"{_number(s.tpf)} ± {_number(s.tpf_stderr)}", _number(s.tpf_ratio_of_sums)]
        cells += [_number(token_efficiency(row), ".3f"), _number(s.nfe, ".1f"), s.cut, s.errors]
        lines.append(table_line(cells))
    return [
        *lines,
        "",
        "NFE: mean decode forwards a sample, store-only ones included, prompt-only prefill not. TPF: useful tokens "
        "(before EOS) per NFE, the mean over samples; (sums): all tokens / all NFE. η_tok, the token-efficiency "
        "factor: TPF / (buffer_size x block_size), the share of a whole Block Buffer that becomes tokens. Cut: "
        "answers that ended at the limit of their tokens. An error (a request that could not be decoded) counts as "
        "wrong and is left out of the rates. [95 %]: Wilson interval. se: standard error.",
        "",
    ]


def _aup_lines(aups: Sequence[AupRow], labels: Mapping[str, str]) -> list[str]:
    lines = ["## AUP by task, with its points", ""]
    lines += ["| Model | Method | Task | Eq. 4.1 [95 %] | d3LLM [95 %] | Points (TPF, Acc) | Dropped by d3LLM |"]
    lines += ["|---|---|---|---:|---:|---|---|"]
    for a in aups:
        points = [_point_list(a.points), _point_list(a.dropped) or "none"]
        lines.append(table_line([a.model, a.method, labels[a.task], a.eq41.text(), a.d3llm.text(), *points]))
    lines += ["", *({one_line(f"- {labels[a.task]}: {_y_max_text(a)}"): None for a in aups}), ""]
    return [*lines, AUP_CAPTION, ""]


def _y_max_text(aup: AupRow) -> str:
    pool = "; ".join(aup.y_max_pool)
    return f"y_max {aup.y_max:.2f}, of {aup.y_max_of}; its pool (number of configurations): {pool}"


def _point_list(points: Iterable[AupPoint]) -> str:
    return " ".join(f"({p:.2f}, {y:.2f})" for p, y in points)


def _setting_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_setting_text(name)} {_setting_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_setting_text(inner) for inner in value)
    text = str(value)
    return _code_span(text) if any(mark in text for mark in MARKS) else text


def _code_span(text: str) -> str:
    """The text on one line, as JSON, between more backticks than it holds in a row: nothing of it is Markdown."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    content = json.dumps(text, ensure_ascii=False)
    for mark in JSON_KEEPS:
        content = content.replace(mark, f"\\u{ord(mark):04x}")
    return f"{fence} {content} {fence}"
