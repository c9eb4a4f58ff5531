"""The statistics of the reports, against hand-computed values."""

import math

import pytest

from mbd_core.evaluation.statistics import mean_and_stderr, sign_test


def test_sign_test_is_the_binomial_tail() -> None:
    assert sign_test(48, 31) == pytest.approx(0.0712, abs=1e-4)
    assert sign_test(31, 48) == sign_test(48, 31)
    assert sign_test(0, 0) == sign_test(5, 5) == 1.0
    assert sign_test(6, 0) == 2 * 0.5**6


def test_the_standard_error_is_that_of_the_mean() -> None:
    assert mean_and_stderr([1.0, 2.0, 6.0]) == (3.0, pytest.approx(math.sqrt(7 / 3)))
    assert mean_and_stderr([5.0]) == (5.0, 0.0)
    assert mean_and_stderr([]) == (0.0, 0.0)
