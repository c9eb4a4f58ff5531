"""The statistics of the reports, against hand-computed values."""

import math

import numpy as np
import pytest

from mbd_core.evaluation.measures.statistics import (
    Interval,
    bootstrap,
    mean_and_stderr,
    mean_interval,
    sign_test,
    student_interval,
    wilson_interval,
    wins_and_losses,
)


def test_sign_test_is_the_binomial_tail() -> None:
    assert sign_test(48, 31) == pytest.approx(0.0712, abs=1e-4)
    assert sign_test(31, 48) == sign_test(48, 31)
    assert sign_test(0, 0) == sign_test(5, 5) == 1.0
    assert sign_test(6, 0) == 2 * 0.5**6


def test_students_interval_of_few_values_and_of_many() -> None:
    pair = student_interval([1.0, 3.0])
    assert pair is not None and pair.bounds == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4), (
        "one degree of freedom"
    )
    many = [0.0, 1.0] * 50
    low, high = student_interval(many).bounds
    error = mean_and_stderr(many)[1]
    assert high - 0.5 == pytest.approx(0.5 - low) and 1.98 * error < high - 0.5 < 1.99 * error
    assert student_interval([1.0]) is None


def test_the_wilson_interval_has_its_known_values_and_solves_its_equation() -> None:
    assert wilson_interval(3, 4) == (pytest.approx(0.30064, abs=1e-5), pytest.approx(0.95441, abs=1e-5))
    assert wilson_interval(0, 10) == (0.0, pytest.approx(0.27753, abs=1e-5))
    assert wilson_interval(10, 10) == (pytest.approx(1 - 0.27753, abs=1e-5), 1.0)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for successes, n in ((1, 7), (1200, 1319), (82, 164)):
        for bound in wilson_interval(successes, n):  # where the share lies 1.96 standard errors of the bound away
            error = math.sqrt(bound * (1 - bound) / n)
            assert abs(successes / n - bound) / error == pytest.approx(1.959964, abs=1e-5)


def test_the_standard_error_is_that_of_the_mean() -> None:
    assert mean_and_stderr([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7 / 3)))
    assert mean_and_stderr([1.0, 2.0, 6.0] * 8, "abc" * 8) == (3.0, pytest.approx(math.sqrt(7 / 3))), "not 24 answers"
    assert mean_and_stderr([1.0, 2.0, 6.0], "abc") == mean_and_stderr([1.0, 2.0, 6.0])
    assert mean_and_stderr([1.0, 2.0, 6.0], "aaa") == mean_and_stderr([1.0, 2.0, 6.0])
    assert mean_and_stderr([5.0]) == (5.0, 0.0)
    assert mean_and_stderr([]) == (0.0, 0.0)


def test_a_bootstrapped_mean_has_the_normal_interval_of_many_values() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=1000)
    names = [f"p{number}" for number in range(1000)]
    found = mean_interval(values, names)
    mean, (low, high) = found.value, found.bounds
    assert mean == pytest.approx(values.mean())
    half = 1.96 * values.std() / 1000**0.5
    assert low == pytest.approx(mean - half, abs=half / 5) and high == pytest.approx(mean + half, abs=half / 5)
    assert mean_interval(np.array([2.0, 4.0]), ["p", "p"]) == Interval(value=3.0), (
        "one problem tells nothing of others"
    )
    assert mean_interval(values, names) == found, "the draws follow from the seed"


def test_copies_of_answers_make_no_interval_narrower() -> None:
    values, names = np.array([1.0, 0.0, 0.0, -1.0, 1.0]), list("abcde")
    assert mean_interval(np.tile(values, 5), names * 5) == mean_interval(values, names)
    assert wins_and_losses(zip(names * 5, np.tile(values, 5), strict=True)) == (2, 1)
    assert wins_and_losses([("a", 1.0), ("a", -1.0), ("b", 1.0), ("b", 0.0)]) == (1, 0)


def test_a_draw_takes_as_many_groups_and_as_many_problems_of_each() -> None:
    groups = np.array([0] * 4 + [1] * 4 + [2] * 4)
    (drawn_DP,) = bootstrap(groups, num_draws=50, seed=0)
    by_group = drawn_DP.reshape(50, 3, 4).sum(2)
    assert drawn_DP.shape == (50, 12) and (drawn_DP.sum(1) == 12).all() and (by_group % 4 == 0).all()
    assert (by_group == 0).any() and (drawn_DP > 1).any()


def test_of_one_group_the_draws_are_those_of_its_problems_alone() -> None:
    generator = np.random.default_rng(7)
    plain = [np.bincount(generator.integers(9, size=9), minlength=9) for _ in range(20)]
    (drawn_DP,) = bootstrap(np.zeros(9, dtype=int), num_draws=20, seed=7)
    assert (drawn_DP == plain).all()


def test_an_interval_is_read_by_its_bounds_and_has_none_without_draws() -> None:
    found = Interval.of_draws(2.0, np.array([1.0, np.nan, 3.0]))
    assert found == Interval(value=2.0, low=1.05, high=2.95)
    assert found.is_above(1) and not found.is_above(1.05) and found.is_below(3) and not found.is_below()
    assert found.text("+.1f") == "+2.0 [+1.1, +3.0]" and found.text(".2f", ".1f") == "2.00 [1.1, 3.0]"
    none = Interval.of_draws(2.0, np.array([np.nan]))
    assert none == Interval(value=2.0) and not none.is_above(-1) and not none.is_below(9) and none.text() == "2.00"
