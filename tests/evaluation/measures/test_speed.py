"""Speeds from timed requests: hand-computed values, and a table that says what each column means."""

import pytest

from mbd_core.batch.timing import ALONE, TOGETHER
from mbd_core.evaluation.measures.speed import speeds
from mbd_core.evaluation.measures.summary import ReportKey
from mbd_core.evaluation.report.metrics import METRICS
from mbd_core.evaluation.report.speeds import SPEED_HEADS, speed_table
from mbd_core.tables import markdown


def timed(run: str, begun: float, ended: float, *, tokens: int = 10, config: str = "{}") -> dict[str, object]:
    return {
        "model": "m",
        "method": "MBD",
        "task": "a",
        "config": config,
        "problem_id": "p",
        "run": run,
        "concurrency": 1 if run == ALONE else 2,
        "num_tokens": tokens,
        "num_forwards": 5,
        "error": None,
        "begun": begun,
        "ended": ended,
        "decode_seconds": 0.5,
    }


def test_rates_and_percentiles_are_what_they_are_called() -> None:
    alone = [timed(ALONE, 10.0 * n, 10.0 * n + 1 + n) for n in range(10)]
    together = [timed(TOGETHER, 200, 204), timed(TOGETHER, 200, 202), timed(TOGETHER, 202, 205, tokens=30)]
    (speed,) = speeds([*alone, *together])
    assert (speed.num_alone, speed.num_together, speed.concurrency) == (10, 3, 2)
    assert speed.tps_batch_1 == pytest.approx(100 / 55)
    assert speed.decode_tps_batch_1 == pytest.approx(100 / 5)
    assert speed.forward_ms_batch_1 == pytest.approx(100)
    assert (speed.latency_alone_p50, speed.latency_alone_p90) == (5, 9)
    assert speed.throughput == pytest.approx(50 / 5), "while two run, neither waits for the other's end"
    assert (speed.latency_together_p50, speed.latency_together_p90) == (3, None)


def test_a_configuration_s_speed_does_not_depend_on_another_s() -> None:
    one = [timed(ALONE, 0, 1), timed(TOGETHER, 1, 2)]
    other = [timed(ALONE, 5, 9, config="other"), timed(TOGETHER, 9, 19, config="other")]
    assert speeds([*one, *other]) == speeds(one) + speeds(other)
    assert speeds([{**one[0], "run": None, "error": "RuntimeError: broken"}]) == []


NAMED = ["Batch-1 TPS", "Batch-1 decode TPS", "Throughput"]
MEANT = ("per request, end to end", "its forwards alone", "aggregate of all requests")


def test_the_table_names_and_defines_its_columns() -> None:
    table = speed_table(
        speeds([timed(ALONE, 0, 2), timed(TOGETHER, 2, 6)]),
        {"a": "A"},
        {ReportKey("m", "MBD", "a", "{}"): "tau_m2t=0.9"},
    )
    assert markdown([table]).splitlines()[-1] == (
        "| m | MBD | A | tau_m2t=0.9 | 1 | 5.0 | 20.0 | 100.00 | 2.000 / - | 1 | 2.5 | 4.000 / - / - |"
    )
    assert all(len(row) == len(SPEED_HEADS) for row in table.rows)
    meanings = {metric.name: metric.meaning for metric in METRICS.values()}
    for term in ("Batch-1 TPS", "Batch-1 decode TPS", "Throughput", "Latency"):
        assert any(name.startswith(term) and meaning for name, meaning in meanings.items())
        assert any(head.startswith(term) for head in SPEED_HEADS)
    assert [next(head for head in SPEED_HEADS if meant in head).partition(" (")[0] for meant in MEANT] == NAMED
    assert "with 2 requests under way" in str(table.lead[0])
