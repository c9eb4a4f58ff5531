"""The distances against what they are by definition."""

from itertools import permutations

import numpy as np
import pytest

from research.alignment.distances import LEAST_STATES, bootstrap_weights, compare, coupling_cost, wasserstein
from research.alignment.states import States


def states(rows: list[list[float]], problems: list[int] | None = None) -> States:
    ratios = np.full((len(rows), max(map(len, rows))), np.nan)
    for place, row in zip(ratios, rows, strict=True):
        place[: len(row)] = row
    problem = np.array(problems if problems is not None else range(len(rows)))
    return States(ratios_SN=ratios, problem_S=problem, num_problems=int(problem.max()) + 1)


def exact(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Wasserstein-1 of as many states on both sides: the cheapest of all pairings."""
    return min(np.abs(ours - theirs[list(order)]).sum(1).mean() for order in permutations(range(len(theirs))))


def test_numbers_on_a_line_are_as_far_as_their_cheapest_pairing() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        ours, theirs = rng.random(5), rng.random(5)
        (found,) = wasserstein(ours, np.ones((1, 5)), theirs)
        assert found == pytest.approx(exact(ours[:, None], theirs[:, None]))
    (halved,) = wasserstein(np.array([0.0, 1.0]), np.array([[3, 1]]), np.array([0.0]))
    assert halved == pytest.approx(0.25)


def test_vectors_lie_between_their_bounds() -> None:
    rng, strict = np.random.default_rng(1), 0
    for _ in range(20):
        ours, theirs = rng.random((4, 3)), rng.random((4, 3))
        lower = sum(float(wasserstein(ours[:, n], np.ones((1, 4)), theirs[:, n])[0]) for n in range(3))
        true, upper = exact(ours, theirs), coupling_cost(ours, theirs)
        assert lower <= true + 1e-12 and true <= upper + 1e-12
        strict += lower < true - 1e-3
    assert strict > 10  # so it is a bound and no equality


def test_the_same_states_have_no_distance_and_shifted_ones_their_shift() -> None:
    rng = np.random.default_rng(2)
    rows = [[t, 0.5 + t] for t in rng.random(200) / 4] + [[t] for t in rng.random(100)]
    same = compare(states(rows), states(rows), num_bootstrap=20, seed=0)
    assert same.delta_r.value == 0.0 and same.delta_t == (0.0, 0.0) and same.left_out == 0.0
    assert {d.value for d in same.slots_tv + same.slots_w1} == {0.0}
    moved = [[a + 0.125 for a in row] for row in rows[:200]]
    (vectors,) = compare(states(rows), states(moved), num_bootstrap=20, seed=0).by_size
    assert vectors.size == 2 and vectors.lower.value == pytest.approx(0.25) and vectors.upper == pytest.approx(0.25)


def test_sizes_and_slots_are_compared_each_by_itself() -> None:
    ones, twos = [[0.25]] * 60, [[0.25, 1.0]] * 40
    found = compare(states(ones + twos), states(ones[:20] + twos * 2), num_bootstrap=20, seed=0)
    assert found.delta_r.value == pytest.approx(0.4)  # 60 % and 20 % of size 1
    assert [size.size for size in found.by_size] == [2] and found.left_out == pytest.approx(0.6)
    assert len(ones[:20]) < LEAST_STATES
    assert [d.value for d in found.slots_tv] == [0.0, 0.0]


def test_intervals_are_over_problems() -> None:
    """Ten states of one problem are one draw: with two such problems the intervals are as wide as the difference."""
    rows = [[0.0]] * 50 + [[1.0]] * 50
    split = compare(states(rows, [0] * 50 + [1] * 50), states([[0.0]] * 50), num_bootstrap=200, seed=0)
    mixed = compare(states(rows, [i % 50 for i in range(100)]), states([[0.0]] * 50), num_bootstrap=200, seed=0)
    assert (split.slots_w1[0].value, split.slots_w1[0].low, split.slots_w1[0].high) == (0.5, 0.0, 1.0)
    assert mixed.slots_w1[0].low == mixed.slots_w1[0].high == pytest.approx(0.5)
    weights = bootstrap_weights(states(rows, [0] * 50 + [1] * 50), num_bootstrap=5, seed=0)
    assert weights.shape == (6, 100) and (weights[0] == 1).all() and (weights.sum(1) == 100).all()
