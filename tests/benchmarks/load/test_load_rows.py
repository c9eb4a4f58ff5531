"""Rows of a load: percentiles only where there are enough values, rates of what ended, ratios round by round."""

from pathlib import Path

import pytest

from benchmarks.load.loads import Arrival, Concurrency, LoadRun, Poisson, RequestRecord
from benchmarks.load.rows import (
    RATIO_COLUMNS,
    ROW_COLUMNS,
    LatencyObjective,
    draw_load,
    load_row,
    parse_objective,
    percentile,
    ratio_row,
)
from benchmarks.measuring import markdown


def record(first: float, *, last: float | None = None, error: str | None = None) -> RequestRecord:
    """11 tokens: the first at `first` seconds, ten at `last`."""
    last = first if last is None else last
    arrivals = (Arrival(at=first, num_tokens=1), Arrival(at=last, num_tokens=10))
    return RequestRecord(due=0.0, arrivals=arrivals, ended=last, error=error)


def run(*records: RequestRecord, seconds: float = 10.0) -> LoadRun:
    return LoadRun(records=records, seconds=seconds)


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(v) for v in range(200, 0, -1)]
    assert [percentile(values, p) for p in (50, 90, 99)] == [100.0, 180.0, 198.0]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0


def test_a_percentile_of_too_few_values_is_none() -> None:
    assert percentile([1.0] * 99, 99) is None
    assert percentile([1.0] * 100, 99) == 1.0
    assert percentile([1.0] * 9, 90) is None
    assert percentile([], 50) is None


def test_what_failed_counts_as_an_error_and_for_nothing_else() -> None:
    runs = [run(record(1.0), record(2.0, last=4.0), record(0.1, error="HTTP 500"), record(0.2, error="HTTP 500"))]
    row = load_row("ours", Concurrency(2), runs)
    assert (row["num_ended"], row["num_errors"], row["errors"]) == (2, 2, {"HTTP 500": 2})
    assert (row["requests_per_second"], row["tokens_per_second"]) == (0.2, 2.2)
    assert (row["ttft_p50"], row["tpot_p50"], row["e2e_p50"]) == (1.0, 0.0, 1.0)
    assert row["itl_mean"] == pytest.approx(2.0 / 20)
    assert row["tokens_per_arrival"] == 22 / 4
    assert row["counts"] == {"ttft": 2, "tpot": 2, "itl": 20, "gap": 2, "e2e": 2}
    assert (row["load"], row["kind"], "goodput" in row) == ("2 at once", "Concurrency", False)


def test_rates_are_the_median_of_the_rounds() -> None:
    runs = [run(record(1.0), seconds=s) for s in (1.0, 2.0, 50.0)]
    row = load_row("ours", Poisson(3.0), runs)
    assert (row["tokens_per_second"], row["load"]) == (5.5, "3 a second")
    assert row["tokens_per_second_by_round"] == [11.0, 5.5, 0.22]


def test_goodput_counts_the_requests_within_every_limit() -> None:
    objective = parse_objective("ttft=1500, tpot=100")
    assert objective == LatencyObjective({"ttft": 1.5, "tpot": 0.1})
    good, slow_first, slow_tokens = record(1.0, last=1.9), record(1.6), record(1.0, last=2.1)
    row = load_row("ours", Concurrency(1), [run(good, slow_first, slow_tokens, record(1.0, error="x"))], objective)
    assert row["goodput"] == 0.1


@pytest.mark.parametrize("text", ["", "ttfb=3", "ttft", "ttft=0", "tpot=fast", "e2e=inf"])
def test_a_wrong_objective_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--slo"):
        parse_objective(text)


def test_a_ratio_is_that_of_runs_of_one_round() -> None:
    runs = [run(record(1.2), seconds=10.0), run(record(2.0), seconds=40.0), run(record(3.0), seconds=10.0)]
    bases = [run(record(1.0), seconds=9.0), run(record(2.0), seconds=20.0), run(record(2.0), seconds=8.0)]
    row = ratio_row("ours", "engine", Concurrency(4), runs, bases)
    assert row["throughput"] == pytest.approx(0.8)
    assert row["first_token"] == pytest.approx(1.2)
    assert (row["throughput_range"], row["first_token_range"]) == ("0.500 to 0.900", "1.000 to 1.500")


def test_a_round_without_an_answer_has_no_ratio() -> None:
    row = ratio_row("a", "b", Concurrency(1), [run(record(1.0, error="x"))], [run(record(1.0))])
    assert (row["throughput"], row["first_token"]) == (None, None)
    assert markdown([row], RATIO_COLUMNS).endswith("| a | b | 1 at once | - | - | - | - | 1 |")


def test_rows_become_a_table_and_a_plot(tmp_path: Path) -> None:
    rows = [load_row(t, load, [run(record(1.0))]) for load in (Concurrency(1), Poisson(2.0)) for t in ("a", "b")]
    assert "| a | 1 at once | 1 | 0 | 0.10 | 1.1 | 5.50 | 1000.0 | - |" in markdown(rows, ROW_COLUMNS)
    draw_load(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
