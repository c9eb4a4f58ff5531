"""The speed of each configuration, from the requests that were timed with it: TPS, throughput, latency percentiles."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mbd_core.batch.rows import TimedRow
from mbd_core.batch.timing import ALONE, TOGETHER
from mbd_core.evaluation.measures.statistics import percentile


def config_of(row: TimedRow) -> tuple[str, str, str, str]:
    """The subject of a timed row: model, method, task and configuration."""
    return (row["model"], row["method"], row["task"], row["config"])


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """One configuration's speed on a task. Seconds are the engine's: from the moment when it gets a request, of which
    nothing is cached, to the moment when it returns all tokens of the answer.

    num_alone, num_together  requests in the two runs: one at a time, and `concurrency` always under way
    tpf_alone            useful tokens / forwards of the requests that ran one at a time
    tps_batch_1          useful tokens / seconds, one request at a time
    decode_tps_batch_1   useful tokens / seconds of the forwards in NFE alone: the papers' TPS, TPF over step time
    forward_ms_batch_1   milliseconds of one such forward
    throughput           useful tokens of all requests together / seconds from the first's beginning to the last's end
    latency_*            percentiles of a request's seconds; `None` if too few requests were timed for the percentile
    """

    model: str
    method: str
    task: str
    config: str
    num_alone: int
    tpf_alone: float
    tps_batch_1: float
    decode_tps_batch_1: float
    forward_ms_batch_1: float
    latency_alone_p50: float | None
    latency_alone_p90: float | None
    concurrency: int
    num_together: int
    throughput: float
    latency_together_p50: float | None
    latency_together_p90: float | None
    latency_together_p99: float | None


def speeds(rows: Iterable[TimedRow]) -> list[MeasuredSpeed]:
    """The speed of every timed configuration, in the order of its first row."""
    cases: dict[tuple[str, str, str, str], list[TimedRow]] = {}
    for row in rows:
        if row["error"] is None:
            cases.setdefault(config_of(row), []).append(row)
    return [_speed(*case, of_case) for case, of_case in cases.items()]


def _speed(model: str, method: str, task: str, config: str, rows: Sequence[TimedRow]) -> MeasuredSpeed:
    lone_rows = [row for row in rows if row["run"] == ALONE]
    rows_at_once = [row for row in rows if row["run"] == TOGETHER]
    alone_seconds, together_seconds = (
        [row["ended"] - row["begun"] for row in run] for run in (lone_rows, rows_at_once)
    )
    alone_tokens = sum(row["num_tokens"] for row in lone_rows)
    alone_forwards = sum(row["num_forwards"] for row in lone_rows)
    decode_seconds = sum(row["decode_seconds"] for row in lone_rows)
    wall = max(row["ended"] for row in rows_at_once) - min(row["begun"] for row in rows_at_once)
    return MeasuredSpeed(
        model=model,
        method=method,
        task=task,
        config=config,
        num_alone=len(lone_rows),
        tpf_alone=_rate(alone_tokens, alone_forwards),
        tps_batch_1=_rate(alone_tokens, sum(alone_seconds)),
        decode_tps_batch_1=_rate(alone_tokens, decode_seconds),
        forward_ms_batch_1=1000 * _rate(decode_seconds, alone_forwards),
        latency_alone_p50=percentile(alone_seconds, 50),
        latency_alone_p90=percentile(alone_seconds, 90),
        concurrency=max(row["concurrency"] for row in rows_at_once),
        num_together=len(rows_at_once),
        throughput=_rate(sum(row["num_tokens"] for row in rows_at_once), wall),
        latency_together_p50=percentile(together_seconds, 50),
        latency_together_p90=percentile(together_seconds, 90),
        latency_together_p99=percentile(together_seconds, 99),
    )


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0
