"""The speeds of a sweep: their table, the gain that TPF predicts, an endpoint's seconds.

TPS = TPF / T_step. If TPF grows by the factor `tpf_gain` and T_step by `latency_cost`, TPS is predicted to grow by
`tpf_gain / latency_cost`. For the decode TPS that holds by definition. The TPS measured here is a whole request's,
with its prompt and the engine's work between forwards, so it may differ.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbd_core.evaluation.measures.speed import MeasuredSpeed
from mbd_core.evaluation.measures.statistics import percentile
from mbd_core.evaluation.measures.summary import ReportKey, ReportRow, best_row
from mbd_core.evaluation.report.metrics import METRICS, SUBJECT
from mbd_core.evaluation.sweep.endpoints.endpoint import is_endpoint
from mbd_core.evaluation.sweep.folder import read_record, read_samples
from mbd_core.tables import Table

TPS, DECODE_TPS, FORWARD, THROUGHPUT = (METRICS[name] for name in ("tps", "decode_tps", "forward_ms", "throughput"))
SPEED_HEADS = (
    *(*SUBJECT, "n alone", TPS.head, DECODE_TPS.head, FORWARD.head, METRICS["latency"].head),
    *("n together", THROUGHPUT.head, METRICS["latency_together"].head),
)
SPEED_NOTE = (
    "Measured on the machine named above, each configuration by itself in an engine of its own buffer size that runs "
    "nothing else, warmed up with the same requests, without a prefix cache. No number above this section differs "
    "from run to run. Together means with {together} requests under way while there are enough."
)


def speed_table(times: Sequence[MeasuredSpeed], labels: Mapping[str, str], varied: Mapping[ReportKey, str]) -> Table:
    """The table of speeds. `varied` has the settings in which a method's configurations differ."""
    concurrencies = " or ".join(str(count) for count in sorted({speed.concurrency for speed in times}))
    return Table(
        title="Speed",
        brief=True,
        lead=(SPEED_NOTE.format(together=concurrencies),),
        see="What the numbers are",
        columns=SPEED_HEADS,
        numeric=range(4, len(SPEED_HEADS)),
        rows=[
            (
                *(s.model, s.method, labels[s.task], varied[key_of(s)] or None, s.num_alone),
                *(metric.text(metric.of(s)) for metric in (TPS, DECODE_TPS, FORWARD)),
                _seconds(s.latency_alone_p50, s.latency_alone_p90),
                *(s.num_together, THROUGHPUT.text(s.throughput)),
                _seconds(s.latency_together_p50, s.latency_together_p90, s.latency_together_p99),
            )
            for s in times
        ],
    )


def _seconds(*values: float | None) -> str:
    return " / ".join(METRICS["latency"].text(value) for value in values)


def key_of(speed: MeasuredSpeed) -> ReportKey:
    return ReportKey(speed.model, speed.method, speed.task, speed.config)


GAIN_HEADS = ("TPF gain", "Latency cost", "Predicted TPS gain", "Measured TPS gain", "Measured / predicted")
GAIN_DEFINITIONS = (
    "TPF gain: tokens per forward of the requests that were timed one at a time (ratio of sums), against the task's "
    "baseline. Latency cost: milliseconds of a forward, likewise. Predicted TPS gain: their quotient (MBD-LMs, "
    "Section 4.5). Measured TPS gain: Batch-1 TPS of the table above, likewise, prompts included. The baseline is the "
    "most accurate timed configuration of the report's first model and method:"
)


@dataclass(frozen=True, kw_only=True)
class SpeedGain:
    """A configuration's speed as multiples of its baseline's. The baseline is a configuration on the same task."""

    baseline: str
    tpf_gain: float
    latency_cost: float
    predicted_tps_gain: float
    measured_tps_gain: float


def speed_gains(times: Sequence[MeasuredSpeed], rows: Sequence[ReportRow]) -> dict[ReportKey, SpeedGain]:
    """The gain of every timed configuration; none on a task whose baseline gave no token."""
    speed_of = {key_of(speed): speed for speed in times}
    gains: dict[ReportKey, SpeedGain] = {}
    for task in dict.fromkeys(key.task for key in speed_of):
        of_task = [row for row in rows if row.key.task == task and row.key in speed_of]
        first = [row for row in of_task if _method(row) == _method(of_task[0])]
        baseline = best_row(first)
        base = speed_of[baseline.key]
        if not base.tps_batch_1:
            continue
        name = ", ".join(filter(None, (baseline.key.model, baseline.key.method, baseline.varied)))
        for row in of_task:
            speed = speed_of[row.key]
            if speed.tps_batch_1:
                gains[row.key] = _gain(name, speed, base)
    return gains


def _gain(baseline: str, speed: MeasuredSpeed, base: MeasuredSpeed) -> SpeedGain:
    tpf_gain = speed.tpf_alone / base.tpf_alone
    latency_cost = speed.forward_ms_batch_1 / base.forward_ms_batch_1
    return SpeedGain(
        baseline=baseline,
        tpf_gain=tpf_gain,
        latency_cost=latency_cost,
        predicted_tps_gain=tpf_gain / latency_cost,
        measured_tps_gain=speed.tps_batch_1 / base.tps_batch_1,
    )


def gain_table(
    gains: Mapping[ReportKey, SpeedGain], labels: Mapping[str, str], varied: Mapping[ReportKey, str]
) -> Table:
    """The gains, below the speeds."""
    rows = []
    for key, gain in gains.items():
        multiples = (gain.tpf_gain, gain.latency_cost, gain.predicted_tps_gain, gain.measured_tps_gain)
        ratio = gain.measured_tps_gain / gain.predicted_tps_gain
        subject = (key.model, key.method, labels[key.task], varied[key] or None)
        rows.append((*subject, *(f"{value:.2f}x" for value in multiples), f"{ratio:.2f}"))
    return Table(
        title="TPS gain, predicted and measured",
        level=3,
        lead=(GAIN_DEFINITIONS, list(dict.fromkeys(f"{labels[key.task]}: {g.baseline}" for key, g in gains.items()))),
        columns=(*SUBJECT, *GAIN_HEADS),
        numeric=range(4, 9),
        rows=rows,
    )


def _method(row: ReportRow) -> tuple[str, str]:
    return row.key.model, row.key.method


COLUMNS = ("sample", "model", "method", "task", "config", "problem_id", "seconds")


@dataclass(frozen=True, kw_only=True)
class EndpointSeconds:
    """Percentiles of the seconds of an endpoint's answers to a task; `None` if the answers are too few."""

    model: str
    method: str
    task: str
    n: int
    p50: float | None
    p90: float | None
    p99: float | None


def endpoint_seconds(folders: Sequence[Path]) -> list[EndpointSeconds]:
    """The seconds of each endpoint, method and task in the sweeps; a folder that is named twice counts once."""
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


def seconds_table(seconds: Sequence[EndpointSeconds], labels: Mapping[str, str]) -> Table:
    return Table(
        title="Endpoints",
        brief=True,
        lead=(
            "Seconds from a request to its whole answer, with --concurrency requests under way. They include the "
            "network and the endpoint's other load, but no waits before retries. Nearest-rank percentiles.",
        ),
        columns=(*SUBJECT[:3], "n", "p50 / p90 / p99 (s)"),
        numeric=(3, 4),
        rows=[(s.model, s.method, labels[s.task], s.n, _seconds(s.p50, s.p90, s.p99)) for s in seconds],
    )
