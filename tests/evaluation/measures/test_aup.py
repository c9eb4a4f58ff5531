"""Both AUPs: hand-computed values, and that the order of the points does not matter."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.evaluation.measures.aup import are_kept, aup_d3llm, aup_eq41, sorted_points

POINTS = st.lists(st.tuples(st.floats(0.5, 20), st.floats(0, 100)), min_size=1, max_size=8)


def test_eq41_is_the_area_between_the_points() -> None:
    assert aup_eq41([(1.0, 80.0), (3.0, 70.0), (4.0, 60.0)]) == pytest.approx(150 + 65)
    assert aup_eq41([(5.0, 80.0)]) == 0


def test_d3llm_has_the_first_rectangle_and_weights() -> None:
    assert aup_d3llm([(2.0, 40.0)], y_max=80.0) == 80.0
    weighted = 60 * math.exp(-3 * (1 - 60 / 80))
    assert aup_d3llm([(1.0, 64.0), (3.0, 60.0)], y_max=80.0) == pytest.approx(
        64 + (weighted + 64 * math.exp(-3 * 0.2))
    )
    assert aup_d3llm([(1.0, 90.0), (2.0, 90.0)], y_max=80.0) == pytest.approx(180), "no weight is above 1"


@given(POINTS)
def test_d3llm_without_weights_or_floor_is_eq41_and_the_first_rectangle(points: list[tuple[float, float]]) -> None:
    first = min(points, key=lambda p: (p[0], -p[1]))
    plain = aup_d3llm(points, y_max=100.0, alpha=0.0, y_min_offset=100.0)
    assert plain == pytest.approx(aup_eq41(points) + first[0] * first[1])


@given(POINTS, st.randoms())
def test_no_aup_depends_on_the_order_given(points: list[tuple[float, float]], random: object) -> None:
    shuffled = list(points)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert aup_eq41(points) == aup_eq41(shuffled)
    assert aup_d3llm(points, y_max=100.0) == aup_d3llm(shuffled, y_max=100.0)


@given(POINTS)
def test_d3llm_ignores_the_points_it_drops(points: list[tuple[float, float]]) -> None:
    curve = sorted_points(points)
    kept = are_kept(curve)
    assert sorted(map(tuple, curve.tolist())) == sorted(points) and kept[0]
    assert kept.tolist() == [y >= curve[0, 1] - 5 for y in curve[:, 1]]
    assert aup_d3llm(curve[kept], y_max=100.0) == aup_d3llm(points, y_max=100.0)


@given(st.lists(st.tuples(*[st.tuples(st.floats(0.5, 20), st.floats(1, 100))] * 3), min_size=1, max_size=6))
def test_draws_of_a_curve_are_measured_as_each_by_itself(drawn: list[tuple[tuple[float, float], ...]]) -> None:
    points_K2D = np.array(drawn).transpose(0, 2, 1)
    y_max_D = points_K2D[:, 1].max(axis=0)
    alone = [points_K2D[:, :, draw] for draw in range(3)]
    assert aup_eq41(points_K2D) == pytest.approx([aup_eq41(points) for points in alone])
    expected = [aup_d3llm(points, y_max=y_max) for points, y_max in zip(alone, y_max_D, strict=True)]
    assert aup_d3llm(points_K2D, y_max=y_max_D) == pytest.approx(expected)


def test_a_fastest_point_that_lost_too_much_is_dropped_and_not_raised() -> None:
    assert aup_d3llm([(1.0, 80.0), (6.0, 74.0)], y_max=81.0) == 80.0
    assert are_kept(np.array([(1.0, 80.0), (6.0, 74.0)])).tolist() == [True, False]
    assert are_kept(np.array([(1.0, 80.0), (6.0, 75.0)])).all(), "5 below is kept"


def test_aup_of_nothing_and_of_nothing_right() -> None:
    with pytest.raises(ValueError):
        aup_eq41([])
    with pytest.raises(ValueError, match="y_max=0"):
        aup_d3llm([(1.0, 5.0)], y_max=0.0)
    assert aup_d3llm([(1.0, 0.0), (2.0, 0.0)], y_max=0.0) == 0.0
