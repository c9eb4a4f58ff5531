"""Spearman's correlation, its exact test and its interval, against known values."""

import numpy as np
import pytest

from research.ledger.distances import rank_correlation, ranks, spearman


def test_ranks_share_ties() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_known_correlations_of_each_column() -> None:
    columns = np.array([[10, 20, 30, 40], [9, 7, 5, 1], [2, 2, 2, 2]], dtype=float).T
    assert spearman([1, 2, 3, 4], columns) == pytest.approx([1.0, -1.0, np.nan], nan_ok=True)
    scores = np.array([[7, 27, 2, 50, 28, 29, 20, 12, 6, 17]], dtype=float).T
    assert spearman([106, 100, 86, 101, 99, 103, 97, 113, 112, 110], scores) == pytest.approx([-29 / 165])


@pytest.mark.parametrize(("outcomes", "p"), [([4, 3, 2, 1], 2 / 24), ([4, 3, 2, 1, 0], 2 / 120)])
def test_the_p_of_a_perfect_order_is_two_of_all_orders(outcomes: list[float], p: float) -> None:
    drawn = np.repeat(np.array(outcomes, dtype=float)[:, None], 30, axis=1)
    found = rank_correlation(range(len(outcomes)), drawn)
    assert found.n == len(outcomes) and found.p_value == pytest.approx(p)
    assert (found.rho.value, found.rho.low, found.rho.high) == pytest.approx((-1.0, -1.0, -1.0))


def test_outcomes_that_are_not_told_apart_have_a_wide_interval() -> None:
    generator = np.random.default_rng(0)
    outcomes_RD = np.array([0.01, 0.02, 0.03, 0.04])[:, None] + generator.normal(0, 1, size=(4, 400))
    outcomes_RD[:, 0] = (0.01, 0.02, 0.03, 0.04)
    found = rank_correlation([1, 2, 3, 4], outcomes_RD)
    assert found.rho.value == pytest.approx(1.0)
    assert found.rho.low < -0.5


def test_too_few_rows_and_equal_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="give 3 to 9"):
        rank_correlation([1, 2], np.ones((2, 5)))
    with pytest.raises(ValueError, match="the same distance, or the same outcome"):
        rank_correlation([1, 2, 3], np.ones((3, 5)))
