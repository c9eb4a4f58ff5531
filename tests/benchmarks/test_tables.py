"""Tables and ratios of benchmarks: like is compared with like, runs take turns."""

import pytest

from benchmarks.engine import buffer_ratios, host_growth
from benchmarks.measuring import interleaved, markdown


def test_runs_take_turns_and_begin_in_turn() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = interleaved({name: lambda name=name: run(name) for name in "abc"}, repeats=3)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab"
    assert taken["a"] == [1.0, 6.0, 8.0]
    with pytest.raises(ValueError, match="repeats=0"):
        interleaved({}, repeats=0)


def test_ratios_compare_like_with_like() -> None:
    def row(rows: int, buffer_size: int, step: float, host: float) -> dict[str, object]:
        return {
            "model": "m",
            "rows": rows,
            "buffer_size": buffer_size,
            "prefix": 64,
            "step_seconds": step,
            "host_seconds": host,
            "forward_seconds": 1.0,
        }

    table = [row(1, 1, 2.0, 1.0), row(1, 2, 3.0, 1.0), row(8, 2, 9.0, 3.0)]
    (ratio,) = buffer_ratios(table)
    assert (ratio["rows"], ratio["step_over_single"], ratio["paper"]) == (1, 1.5, 1.24)
    (growth,) = host_growth(table)
    assert (growth["buffer_size"], growth["from_rows"], growth["to_rows"]) == (2, 1, 8)
    assert (growth["growth"], growth["growth_beside_forward"]) == (3.0, 4.0)


def test_a_table_shows_milliseconds_and_gaps() -> None:
    text = markdown([{"a": 0.0015, "b": True}, {"a": 0.002}], {"a": "step (ms)|.1f", "b": "ok"})
    assert text.splitlines() == ["| step (ms) | ok |", "|---|---|", "| 1.5 | yes |", "| 2.0 | - |"]
