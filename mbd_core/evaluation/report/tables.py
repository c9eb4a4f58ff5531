"""The smaller tables of a report: accuracies by rule, speeds, the gain that TPF predicts, an endpoint's seconds.

TPS = TPF / T_step, so a configuration with `tpf_gain` times the tokens a forward and `latency_cost` times the seconds
a forward is to have `tpf_gain / latency_cost` times the TPS. That holds for the decode TPS by definition; what is
measured here is a whole request's, with its prompt and what the engine does between forwards, which can miss it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbd_core.evaluation.measures.rates import RULES
from mbd_core.evaluation.measures.statistics import percentile
from mbd_core.evaluation.measures.summary import ReportKey, ReportRow, best_row
from mbd_core.evaluation.report.sections import one_line, table_line
from mbd_core.evaluation.sweep.endpoint import is_endpoint
from mbd_core.evaluation.sweep.folder import read_record, read_samples
from mbd_core.evaluation.sweep.timed_runs import Speed

# The table of accuracies by each rule that judged the samples: strict and flexible, base and plus.

RULE_DEFINITIONS = (
    "Percent right with the 95 % Wilson interval; a dash where the rule is none of the task's, or judged nothing. "
    "Strict: the answer stands where the task wants it, behind its mark or in \\boxed. Flexible: the answer is found "
    "anywhere (of the project's own tasks the last number, else by math-verify). Base: the program passes the "
    "benchmark's own inputs. Plus: these and EvalPlus's further inputs. Acc of the other tables is flexible for GSM8K "
    "and MATH, strict for the project's own tasks, and plus for EvalPlus's. A sample that was not judged is wrong."
)


def rule_lines(rows: Sequence[ReportRow], labels: Mapping[str, str]) -> list[str]:
    """The section; nothing where no rule but the task's own judged a sample."""
    judged = [row for row in rows if row.summary.by_rule]
    rules = [rule for rule in RULES if any(rule in row.summary.by_rule for row in judged)]
    if not rules:
        return []
    heads = ["Model", "Method", "Task", "Config", "n", *(f"{rule.capitalize()} [95 %]" for rule in rules)]
    lines = ["## Accuracy by rule", "", f"| {' | '.join(heads)} |", "|---|---|---|---|" + "---:|" * (1 + len(rules))]
    for row in judged:
        found = [row.summary.by_rule.get(rule) for rule in rules]
        accuracies = ["-" if one is None else one.text(bounds=".1f") for one in found]
        subject = (row.key.model, row.key.method, labels[row.key.task], row.varied or "-", row.summary.n)
        lines.append(table_line([*subject, *accuracies]))
    return [*lines, "", RULE_DEFINITIONS, ""]


# The table of speeds in a report, with what each column means.

SPEED_HEADS = (
    "Model",
    "Method",
    "Task",
    "Config",
    "n alone",
    "Batch-1 TPS (per request, end to end, tok/s)",
    "Batch-1 decode TPS (its forwards alone, tok/s)",
    "Batch-1 forward (ms)",
    "Latency alone p50 / p90 (s)",
    "n together",
    "Throughput (aggregate of all requests, tok/s)",
    "Latency together p50 / p90 / p99 (s)",
)
SPEED_DEFINITIONS = (
    "Measured on the machine named above, each configuration by itself in an engine of its own buffer size that runs "
    "nothing else, warmed up with the same requests, without a prefix cache. No number above this section differs "
    "from run to run. A request's seconds run from the moment when the engine is given its tokens to the moment when "
    "it gives the whole answer back, prompt included, tokenizer and network not. Batch-1 TPS: useful tokens / these "
    "seconds, one request at a time. Batch-1 decode TPS: useful tokens / seconds of the forwards that NFE counts (TPF "
    "/ step time). Throughput: useful tokens of all requests / seconds from the first's beginning to the last's end, "
    "with {together} requests under way as long as there are as many. Latency: nearest-rank percentiles of these "
    "seconds; a dash where too few requests were timed."
)


def speed_lines(times: Sequence[Speed], labels: Mapping[str, str], varied: Mapping[ReportKey, str]) -> list[str]:
    """The section; `varied` has the settings in which a method's configurations differ."""
    together = " or ".join(str(count) for count in sorted({speed.concurrency for speed in times}))
    lines = ["", "## Speed", "", SPEED_DEFINITIONS.format(together=together), ""]
    lines += ["| " + " | ".join(SPEED_HEADS) + " |", "|---|---|---|---|" + "---:|" * (len(SPEED_HEADS) - 4)]
    for s in times:
        cells = [
            *(s.model, s.method, labels[s.task], varied[ReportKey(s.model, s.method, s.task, s.config)] or "-"),
            *(str(s.num_alone), f"{s.tps_batch_1:.1f}", f"{s.decode_tps_batch_1:.1f}", f"{s.forward_ms_batch_1:.2f}"),
            _seconds(s.latency_alone_p50, s.latency_alone_p90),
            *(str(s.num_together), f"{s.throughput:.1f}"),
            _seconds(s.latency_together_p50, s.latency_together_p90, s.latency_together_p99),
        ]
        lines.append(table_line(cells))
    return lines


def _seconds(*values: float | None) -> str:
    return " / ".join("-" if value is None else f"{value:.3f}" for value in values)


# The gain in TPS that tokens per forward and the time of a forward predict, beside the measured one (MBD-LMs, 4.5).

GAIN_HEADS = (
    *("Model", "Method", "Task", "Config", "TPF gain", "Latency cost"),
    *("Predicted TPS gain", "Measured TPS gain", "Measured / predicted"),
)
GAIN_DEFINITIONS = (
    "TPF gain: tokens per forward of the requests that were timed one at a time (ratio of sums), against the task's "
    "baseline. Latency cost: milliseconds of a forward, likewise. Predicted TPS gain: their quotient (MBD-LMs, "
    "Section 4.5). Measured TPS gain: Batch-1 TPS of the table above, likewise, prompts included. The baseline is the "
    "most accurate timed configuration of the report's first model and method:"
)


@dataclass(frozen=True, kw_only=True)
class SpeedGain:
    """A configuration's speed as multiples of its baseline's, which is a configuration on the same task."""

    baseline: str
    tpf_gain: float
    latency_cost: float
    predicted_tps_gain: float
    measured_tps_gain: float


def speed_gains(times: Sequence[Speed], rows: Sequence[ReportRow]) -> dict[ReportKey, SpeedGain]:
    """The gain of every timed configuration; none on a task whose baseline gave no token."""
    timed = {_key(speed): speed for speed in times}
    gains: dict[ReportKey, SpeedGain] = {}
    for task in dict.fromkeys(key.task for key in timed):
        of_task = [row for row in rows if row.key.task == task and row.key in timed]
        first = [row for row in of_task if _method(row) == _method(of_task[0])]
        baseline = best_row(first)
        base = timed[baseline.key]
        if not base.tps_batch_1:
            continue
        name = ", ".join(filter(None, (baseline.key.model, baseline.key.method, baseline.varied)))
        for row in of_task:
            speed = timed[row.key]
            if speed.tps_batch_1:
                gains[row.key] = _gain(name, speed, base)
    return gains


def _gain(baseline: str, speed: Speed, base: Speed) -> SpeedGain:
    tpf_gain = speed.tpf_alone / base.tpf_alone
    latency_cost = speed.forward_ms_batch_1 / base.forward_ms_batch_1
    return SpeedGain(
        baseline=baseline,
        tpf_gain=tpf_gain,
        latency_cost=latency_cost,
        predicted_tps_gain=tpf_gain / latency_cost,
        measured_tps_gain=speed.tps_batch_1 / base.tps_batch_1,
    )


def gain_lines(
    gains: Mapping[ReportKey, SpeedGain], labels: Mapping[str, str], varied: Mapping[ReportKey, str]
) -> list[str]:
    """The table, with what its columns mean."""
    if not gains:
        return []
    baselines = {one_line(f"- {labels[key.task]}: {gain.baseline}"): None for key, gain in gains.items()}
    lines = ["", "### TPS gain, predicted and measured", "", GAIN_DEFINITIONS, "", *baselines, ""]
    lines += ["| " + " | ".join(GAIN_HEADS) + " |", "|---|---|---|---|" + "---:|" * (len(GAIN_HEADS) - 4)]
    for key, gain in gains.items():
        ratio = gain.measured_tps_gain / gain.predicted_tps_gain
        cells = (gain.tpf_gain, gain.latency_cost, gain.predicted_tps_gain, gain.measured_tps_gain)
        numbers = [*(f"{value:.2f}x" for value in cells), f"{ratio:.2f}"]
        lines.append(table_line([key.model, key.method, labels[key.task], varied[key] or "-", *numbers]))
    return lines


def _key(speed: Speed) -> ReportKey:
    return ReportKey(speed.model, speed.method, speed.task, speed.config)


def _method(row: ReportRow) -> tuple[str, str]:
    return row.key.model, row.key.method


# How long endpoints took for a sweep's requests, network and their other load included.

COLUMNS = ("sample", "model", "method", "task", "config", "problem_id", "seconds")


@dataclass(frozen=True, kw_only=True)
class EndpointSeconds:
    """Percentiles of the seconds of an endpoint's answers to a task; `None` where there are too few for one."""

    model: str
    method: str
    task: str
    n: int
    p50: float | None
    p90: float | None
    p99: float | None


def endpoint_seconds(folders: Sequence[Path]) -> list[EndpointSeconds]:
    """Of each endpoint, method and task in the sweeps; a folder that is named twice counts once."""
    rows: list[Mapping[str, Any]] = []
    for folder in dict.fromkeys(path.resolve() for path in folders):
        if any(is_endpoint(digest) for digest in read_record(folder).plan["models"].values()):
            rows += read_samples(folder, columns=COLUMNS)
    return summarize_seconds(rows)


def summarize_seconds(rows: Iterable[Mapping[str, Any]]) -> list[EndpointSeconds]:
    """The percentiles of rows that have seconds."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["seconds"] is not None:
            groups.setdefault((row["model"], row["method"], row["task"]), []).append(row["seconds"])
    return [
        EndpointSeconds(
            model=model,
            method=method,
            task=task,
            n=len(seconds),
            p50=percentile(seconds, 50),
            p90=percentile(seconds, 90),
            p99=percentile(seconds, 99),
        )
        for (model, method, task), seconds in groups.items()
    ]


def seconds_lines(found: Sequence[EndpointSeconds], labels: Mapping[str, str]) -> list[str]:
    """The section of a report, with what its columns mean."""
    if not found:
        return []
    lines = [
        "",
        "## Endpoints",
        "",
        "Seconds from a request to its whole answer, --concurrency of them under way: ",
    ]
    lines[-1] += "network and the endpoint's other load included, waits for its retries not. Nearest-rank percentiles."
    lines += ["", "| Model | Method | Task | n | p50 / p90 / p99 (s) |", "|---|---|---|---:|---:|"]
    for one in found:
        cells = " / ".join("-" if value is None else f"{value:.3f}" for value in (one.p50, one.p90, one.p99))
        lines.append(f"| {one.model} | {one.method} | {labels[one.task]} | {one.n} | {cells} |")
    return lines
