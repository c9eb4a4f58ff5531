"""Rates, both AUPs, the report's table: hand-computed values and what must not depend on order."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.paired_test import sign_test
from jobs.seed_table import load_rows
from mbd_core.decoding.request import Counts
from mbd_core.evaluation.aup import aup_d3llm, aup_eq41
from mbd_core.evaluation.rates import Sample, summarize
from mbd_core.evaluation.sweep_report import Row, RunKey, best_row, build_aup, build_rows, render_markdown
from mbd_core.evaluation.tradeoff_plot import draw_plot

POINTS = st.lists(st.tuples(st.floats(0.5, 20), st.floats(0, 100)), min_size=1, max_size=8)


def sample(*, tokens: int, forwards: int, correct: bool = True, seconds: float = 1.0) -> Sample:
    counts = Counts(
        num_prompt_tokens=5,
        num_tokens=tokens,
        num_forwards=forwards,
        num_store_forwards=1,
        num_prefill_forwards=1,
        decode_seconds=seconds,
    )
    return Sample(correct=correct, counts=counts)


# -- AUP ------------------------------------------------------------------------------------------------------------


def test_eq41_is_the_area_between_the_points() -> None:
    assert aup_eq41([(1.0, 80.0), (3.0, 70.0), (4.0, 60.0)]) == pytest.approx(150 + 65)
    assert aup_eq41([(5.0, 80.0)]) == 0


def test_d3llm_has_the_first_rectangle_and_weights() -> None:
    assert aup_d3llm([(2.0, 40.0)], y_max=80.0).value == 80.0
    weighted = 60 * math.exp(-3 * (1 - 60 / 80))
    assert aup_d3llm([(1.0, 64.0), (3.0, 60.0)], y_max=80.0).value == pytest.approx(
        64 + (weighted + 64 * math.exp(-3 * 0.2))
    )
    assert aup_d3llm([(1.0, 90.0), (2.0, 90.0)], y_max=80.0).value == pytest.approx(180), "no weight is above 1"


@given(POINTS)
def test_d3llm_without_weights_or_floor_is_eq41_and_the_first_rectangle(points: list[tuple[float, float]]) -> None:
    first = min(points, key=lambda p: (p[0], -p[1]))
    plain = aup_d3llm(points, y_max=100.0, alpha=0.0, y_min_offset=100.0)
    assert not plain.dropped
    assert plain.value == pytest.approx(aup_eq41(points) + first[0] * first[1])


@given(POINTS, st.randoms())
def test_no_aup_depends_on_the_order_given(points: list[tuple[float, float]], random: object) -> None:
    shuffled = list(points)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert aup_eq41(points) == aup_eq41(shuffled)
    assert aup_d3llm(points, y_max=100.0) == aup_d3llm(shuffled, y_max=100.0)


@given(POINTS)
def test_d3llm_keeps_or_drops_every_point_and_ignores_the_dropped(points: list[tuple[float, float]]) -> None:
    found = aup_d3llm(points, y_max=100.0)
    assert sorted(found.points + found.dropped) == sorted(points)
    assert all(y < found.points[0][1] - 5 for _, y in found.dropped)
    assert all(y >= found.points[0][1] - 5 for _, y in found.points)
    assert aup_d3llm(found.points, y_max=100.0).value == found.value


def test_a_fastest_point_that_lost_too_much_is_reported_not_raised() -> None:
    found = aup_d3llm([(1.0, 80.0), (6.0, 74.0)], y_max=81.0)
    assert (found.value, found.dropped) == (80.0, ((6.0, 74.0),))
    assert aup_d3llm([(1.0, 80.0), (6.0, 75.0)], y_max=81.0).points == ((1.0, 80.0), (6.0, 75.0)), "5 below is kept"


def test_aup_of_nothing_and_of_nothing_right() -> None:
    with pytest.raises(ValueError, match="at least one"):
        aup_eq41([])
    with pytest.raises(ValueError, match="y_max=0"):
        aup_d3llm([(1.0, 5.0)], y_max=0.0)
    assert aup_d3llm([(1.0, 0.0), (2.0, 0.0)], y_max=0.0).value == 0.0


# -- rates ----------------------------------------------------------------------------------------------------------


def test_mean_of_ratios_and_ratio_of_sums_are_different_numbers() -> None:
    found = summarize(
        [sample(tokens=10, forwards=10, seconds=2.0), sample(tokens=90, forwards=30, correct=False, seconds=3.0)]
    )
    assert found.tpf == pytest.approx(2.0)
    assert found.tpf_ratio_of_sums == pytest.approx(2.5)
    assert found.tps == pytest.approx(20.0)
    assert found.nfe == pytest.approx(20.0)
    assert found.accuracy == 50.0
    assert found.accuracy_stderr == pytest.approx(100 * math.sqrt(0.25 / 2))
    assert found.tpf_stderr == pytest.approx(1.0)


def test_an_error_is_wrong_and_leaves_the_rates_alone() -> None:
    good = [sample(tokens=12, forwards=4)] * 3
    failed = Sample(correct=False, counts=None)
    alone, beside = summarize(good), summarize([*good, failed])
    assert (beside.n, beside.errors, beside.accuracy) == (4, 1, 75.0)
    assert (beside.tpf, beside.tps, beside.nfe) == (alone.tpf, alone.tps, alone.nfe)
    assert summarize([failed]).tpf == 0.0
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_both_extractions_have_an_accuracy() -> None:
    math_samples = [Sample(correct=True, counts=None, strict_correct=True, flexible_correct=flag) for flag in (1, 0)]
    assert (summarize(math_samples).accuracy_strict, summarize(math_samples).accuracy_flexible) == (100.0, 50.0)
    assert summarize([sample(tokens=1, forwards=1)]).accuracy_strict is None


# -- report ---------------------------------------------------------------------------------------------------------


def report_rows() -> list[Row]:
    """Two models, two tasks; the MBD model's configurations tie in accuracy on task a."""
    samples, configs = {}, {}
    for model, method, tau, correct, forwards in (
        ("bd", "SingleBD", 0.9, 4, 10),
        ("mbd", "MBD", 0.9, 3, 5),
        ("mbd", "MBD", 0.7, 3, 4),
    ):
        config = {"block_size": 8, "tau_m2t": tau}
        configs[json.dumps(config)] = config
        for task, right in (("a", correct), ("b", correct - 2 * (tau == 0.7))):
            key = RunKey(model, method, task, json.dumps(config))
            samples[key] = [sample(tokens=20, forwards=forwards, correct=i < right) for i in range(4)]
    return build_rows(samples, configs=configs)


def test_the_best_configuration_is_the_most_accurate_then_the_faster() -> None:
    rows = [row for row in report_rows() if row.key.model == "mbd"]
    assert best_row(row for row in rows if row.key.task == "a").config["tau_m2t"] == 0.7
    assert best_row(row for row in rows if row.key.task == "b").config["tau_m2t"] == 0.9
    assert {row.varied for row in rows} == {"tau_m2t=0.9", "tau_m2t=0.7"}


def test_aup_takes_all_configurations_and_the_task_s_best_accuracy() -> None:
    aups = build_aup(report_rows())
    found = {(a.model, a.task): a for a in aups}
    assert len(aups) == len(found) == 4
    assert found["mbd", "a"].y_max == 100.0
    assert found["mbd", "a"].points == ((4.0, 75.0), (5.0, 75.0))
    assert found["mbd", "a"].aup_eq41 == pytest.approx(75.0)
    assert found["mbd", "b"].dropped == ((5.0, 25.0),)
    assert found["bd", "a"].aup_eq41 == 0.0
    assert found["bd", "a"].aup_d3llm == pytest.approx(200.0)


def test_the_table_has_the_columns_of_table_1_and_their_averages() -> None:
    rows = report_rows()
    text = render_markdown(rows, build_aup(rows), labels={"a": "A", "b": "B"}, settings={"seed": 7})
    table = [line for line in text.splitlines() if line.startswith("|")][:6]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0][:7] == ["Model", "A Acc ↑", "A TPF ↑", "B Acc ↑", "B TPF ↑", "Average Acc ↑", "Average TPF ↑"]
    assert len({len(row) for row in cells}) == 1
    assert cells[2][0] == "*bd (blksz=8)*"
    assert cells[3][:7] == ["SingleBD", "100.00", "2.00", "100.00", "2.00", "100.00", "2.00"]
    assert cells[5][:7] == ["MBD", "75.00", "5.00", "75.00", "4.00", "75.00", "4.50"]
    assert "- mbd, MBD: A: tau_m2t=0.7; B: tau_m2t=0.9" in text
    assert re.search(r"^- seed: 7$", text, re.MULTILINE)


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    draw_plot(report_rows(), tmp_path / "plot.png", labels={"a": "A", "b": "B"})
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_sign_test_is_the_binomial_tail() -> None:
    assert sign_test(48, 31) == pytest.approx(0.0712, abs=1e-4)
    assert sign_test(31, 48) == sign_test(48, 31)
    assert sign_test(0, 0) == sign_test(5, 5) == 1.0
    assert sign_test(6, 0) == 2 * 0.5**6


def test_seed_table_refuses_a_folder_without_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no report.json"):
        load_rows(tmp_path)
