"""The metrics of a report: where each is stored, its name, unit and form, which way is better, how it is computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mbd_core.tables import Table

MetricName = Literal[
    "accuracy",
    "tpf",
    "tpf_sums",
    "token_efficiency",
    "nfe",
    "positions",
    "tokens",
    "cut",
    "errors",
    "aup_eq41",
    "aup",
    "tps",
    "decode_tps",
    "forward_ms",
    "latency",
    "throughput",
    "latency_together",
]


@dataclass(frozen=True, kw_only=True)
class ReportMetric:
    """A metric.

    field    its field in `report.json`, of the rows, `aup` or `times`
    name     the name in a table's head
    long     the name in words, for the axis of a plot
    form     how a value is formatted
    meaning  how it is computed from counts
    """

    field: str
    name: str
    long: str = ""
    unit: str = ""
    form: str = ".2f"
    better: Literal["↑", "↓", ""] = ""
    meaning: str

    @property
    def head(self) -> str:
        """The name with its unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def arrow(self) -> str:
        """The name with the direction in which it is better."""
        return f"{self.name} {self.better}"

    @property
    def axis(self) -> str:
        return f"{self.long} ({self.unit or self.name})"

    def of(self, holder: Any) -> float | None:
        """Its value in a summary or a speed."""
        value: float | None = getattr(holder, self.field)
        return value

    def text(self, value: float | None) -> str:
        """A value, or a dash for an unknown value."""
        return "-" if value is None else format(value, self.form)


METRICS: Mapping[MetricName, ReportMetric] = {
    "accuracy": ReportMetric(
        field="accuracy",
        name="Acc",
        long="accuracy",
        unit="%",
        better="↑",
        meaning="right answers / samples, with the 95 % Wilson interval; a request that could not be decoded is wrong",
    ),
    "tpf": ReportMetric(
        field="tpf",
        name="TPF",
        long="tokens per forward",
        better="↑",
        meaning="useful tokens (before EOS) / NFE of a sample, the mean over samples with its standard error (se)",
    ),
    "tpf_sums": ReportMetric(
        field="tpf_ratio_of_sums",
        name="TPF (sums)",
        better="↑",
        meaning="useful tokens of all samples / NFE of all",
    ),
    "token_efficiency": ReportMetric(
        field="token_efficiency",
        name="η_tok",
        form=".3f",
        better="↑",
        meaning="TPF / (buffer_size x block_size), the share of a whole Block Buffer that becomes tokens (MBD-LMs, "
        "Section 4.5); a canvas has none",
    ),
    "nfe": ReportMetric(
        field="nfe",
        name="NFE",
        long="forwards",
        form=".1f",
        better="↓",
        meaning="decode forwards of a sample, store-only forwards included, prefill alone not; mean over samples",
    ),
    "positions": ReportMetric(
        field="positions",
        name="Positions",
        long="positions of a forward",
        form=".1f",
        better="↓",
        meaning="positions that a forward computes for a sample: its resident blocks, and the copies of masks that a "
        "verification judges; all / all forwards. Where FLOPs bound a step, they are its cost",
    ),
    "tokens": ReportMetric(field="tokens", name="Tokens", meaning="useful tokens of a sample; the mean over samples"),
    "cut": ReportMetric(field="cut", name="Cut", form="d", meaning="answers that ended at the limit of their tokens"),
    "errors": ReportMetric(
        field="errors",
        name="Errors",
        form="d",
        meaning="requests that could not be decoded; they count as wrong and are left out of the rates",
    ),
    "aup_eq41": ReportMetric(
        field="aup_eq41",
        name="AUP Eq. 4.1",
        better="↑",
        meaning="area under accuracy over TPF by the trapezoid, over all configurations of a model and method on a "
        "task; 0 with a single configuration. Of several tasks the mean. [95 %]: percentiles of a bootstrap over "
        "the problems",
    ),
    "aup": ReportMetric(
        field="aup_d3llm",
        name="AUP d3LLM",
        better="↑",
        meaning="the same area with the first rectangle, weighted by accuracy / y_max; no point is added at TPF 1",
    ),
    "tps": ReportMetric(
        field="tps_batch_1",
        name="Batch-1 TPS",
        unit="per request, end to end, tok/s",
        form=".1f",
        better="↑",
        meaning="useful tokens / seconds of requests, one at a time; a request's seconds run from its tokens in to "
        "its whole answer out, with the prompt, without tokenizer and network",
    ),
    "decode_tps": ReportMetric(
        field="decode_tps_batch_1",
        name="Batch-1 decode TPS",
        unit="its forwards alone, tok/s",
        form=".1f",
        better="↑",
        meaning="useful tokens / seconds of the forwards that NFE counts, which is TPF / step time, the papers' TPS",
    ),
    "forward_ms": ReportMetric(
        field="forward_ms_batch_1",
        name="Batch-1 forward",
        unit="ms",
        better="↓",
        meaning="time of one such forward",
    ),
    "latency": ReportMetric(
        field="latency_alone_p50",
        name="Latency alone p50 / p90",
        unit="s",
        form=".3f",
        better="↓",
        meaning="nearest-rank percentiles of the seconds of requests, one at a time; a dash where too few were timed "
        "(p90 takes 10, p99 takes 100: `--timed 100`)",
    ),
    "throughput": ReportMetric(
        field="throughput",
        name="Throughput",
        unit="aggregate of all requests, tok/s",
        form=".1f",
        better="↑",
        meaning="useful tokens of all requests / seconds from the first's beginning to the last's end, with "
        "`--concurrency` requests under way while there are enough",
    ),
    "latency_together": ReportMetric(
        field="latency_together_p50",
        name="Latency together p50 / p90 / p99",
        unit="s",
        form=".3f",
        better="↓",
        meaning="nearest-rank percentiles of these requests' seconds",
    ),
}
SUBJECT = ("Model", "Method", "Task", "Config")  # the first columns of most tables
ACCURACY, TPF, NFE = METRICS["accuracy"], METRICS["tpf"], METRICS["nfe"]


def metric_table() -> Table:
    """The meanings of the columns of a report's tables."""
    return Table(
        title="What the numbers are",
        lead=(
            "An average over tasks is their mean; a method that lacks a task has none. The interval of an average "
            "accuracy combines the tasks' intervals as if the tasks were independent; tasks of the same problems "
            "(HumanEval and HumanEval+) are not. "
            "docs/reference/evaluation.md of the project has more.",
        ),
        columns=("Metric", "Unit", "Better", "Is"),
        rows=[(metric.name, metric.unit or "", metric.better, metric.meaning) for metric in METRICS.values()],
    )
