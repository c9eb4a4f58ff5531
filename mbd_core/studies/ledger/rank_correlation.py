"""Spearman's rank correlation of a few rows, with an exact permutation test and an interval of its measurement."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mbd_core.studies.ledger.paired_bootstrap import Interval

FEWEST = 3
MOST_EXACT = 9
"""So many values have few enough orders (362,880) to try them all."""


@dataclass(frozen=True, kw_only=True)
class RankCorrelation:
    """Of `n` pairs: rho, its interval over draws of the outcomes, and the share of orders with one as far from 0."""

    n: int
    rho: Interval
    p_value: float


def ranks(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The ranks of the values (R,), or of each column (R, D), from 1; equal values have their mean."""
    values = np.asarray(values, dtype=float)
    below, equal = values[None] < values[:, None], values[None] == values[:, None]
    return below.sum(1) + (equal.sum(1) + 1) / 2


def spearman(first: Sequence[float] | np.ndarray, second: np.ndarray) -> np.ndarray:
    """The correlation of the ranks of `first` (R,) with those of each column of `second` (R, D); NaN where one side is
    constant."""
    a_R, b_RD = ranks(first), ranks(second)
    a_R, b_RD = a_R - a_R.mean(), b_RD - b_RD.mean(axis=0)
    spread_D = np.sqrt((a_R @ a_R) * (b_RD**2).sum(axis=0))
    return np.divide(a_R @ b_RD, spread_D, out=np.full(len(spread_D), math.nan), where=spread_D > 0)


@lru_cache(maxsize=2)
def _orders(n: int) -> np.ndarray:
    """All orders of n places."""
    return np.array(list(itertools.permutations(range(n))), dtype=np.int8)


def rank_correlation(distances: Sequence[float], outcomes_RD: np.ndarray) -> RankCorrelation:
    """The correlation of rows' distances with their outcomes (R, D), whose first draw is what was measured.

    The interval says how far another evaluation, and other training seeds, would move it for these very rows; the
    p-value, whether so few rows can tell a correlation from none. Raises `ValueError` for fewer than three rows, or
    more than the test can try, and for rows that are all alike.
    """
    n = len(distances)
    if not FEWEST <= n <= MOST_EXACT:
        raise ValueError(f"a rank correlation of {n} rows has no exact test here: give {FEWEST} to {MOST_EXACT}")
    rho_D = spearman(distances, outcomes_RD)
    if math.isnan(rho_D[0]):
        raise ValueError("all rows have the same distance, or the same outcome: their ranks say nothing")
    a, b = ranks(distances), ranks(outcomes_RD[:, 0])
    a, b = a - a.mean(), b - b.mean()
    products, observed = b[_orders(n)] @ a, abs(float(a @ b))
    p_value = float((np.abs(products) >= observed - 1e-9).mean())
    known_D = rho_D[~np.isnan(rho_D)]
    return RankCorrelation(n=n, rho=Interval.of(known_D), p_value=p_value)
