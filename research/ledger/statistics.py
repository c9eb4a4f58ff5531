"""Intervals over problems and seeds by a bootstrap in two levels, and rank correlation with an exact permutation test.

Every cell is measured on the same draws, so that a difference of two cells is paired by problem and by seed. A run of
another seed is another model on other problems. No draw has a better seed than the best or a worse one than the worst:
where three seeds differ by more than the chance of their problems, the intervals are too narrow, where by less, too
wide; `over_seeds` has Student's beside them. One seed has intervals over its problems alone.

Shape legend: D draws (a bootstrap's first is the rows themselves); S seeds; P problems; K points of a curve.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from mbd_core.evaluation.measures.statistics import sign_test, student_interval
from mbd_core.evaluation.measures.summary import d3llm, sorted_points
from research.ledger.rows import Cell, PairedRows

Measure = Literal["accuracy", "nfe", "tpf"]
NUM_DRAWS = 2000
ALPHA = 3.0  # d3LLM's AUP
BLOCK = 250  # draws at once


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values_D: np.ndarray) -> "Interval":
        """Of a bootstrap's draws: what the rows have, which is the first, with the percentiles of the others."""
        low, high = np.percentile(values_D[1:], [2.5, 97.5])
        return cls(value=float(values_D[0]), low=float(low), high=float(high))

    def text(self, form: str = ".2f") -> str:
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """Exact McNemar's test of two cells: the problems that one alone has right, under a fair coin."""

    first_only: int
    second_only: int

    @property
    def p_value(self) -> float:
        return sign_test(self.first_only, self.second_only)


def mcnemar(rows: PairedRows, first: Cell, second: Cell) -> McNemar:
    one, other = rows.correct[first] > 0, rows.correct[second] > 0
    return McNemar(first_only=int((one & ~other).sum()), second_only=int((other & ~one).sum()))


def weights(rows: PairedRows, *, num_draws: int, seed: int) -> np.ndarray:
    """How often each problem counts (1 + num_draws, P): once, then as often as it was drawn.

    A draw takes as many seeds as there are, with replacement, and for each of them as many of its problems.
    """
    rng = np.random.default_rng(seed)
    places = [np.flatnonzero(rows.seed_P == number) for number in range(len(rows.seeds))]
    drawn_DP = np.ones((1 + num_draws, rows.num_problems), dtype=np.float32)
    for draw_P in drawn_DP[1:]:
        draw_P[:] = 0
        for number in rng.integers(len(places), size=len(places)):
            place = places[number]
            draw_P[place] += np.bincount(rng.integers(len(place), size=len(place)), minlength=len(place))
    return drawn_DP


class Draws:
    """The means of every cell under the same draws, `drawn_DP`: how often each problem counts in each."""

    def __init__(self, rows: PairedRows, drawn_DP: np.ndarray) -> None:
        self.rows = rows
        self._cells = rows.cells
        columns = [
            column
            for cell in self._cells
            for column in (100.0 * rows.correct[cell], rows.forwards[cell], rows.tpf(cell))
        ]
        columns_PC = np.stack(columns, axis=1)
        parts = (drawn_DP[at : at + BLOCK].astype(np.float64) for at in range(0, len(drawn_DP), BLOCK))
        means_DC = np.concatenate([part @ columns_PC / part.sum(1, keepdims=True) for part in parts])
        self._means_DCM = means_DC.reshape(len(drawn_DP), len(self._cells), 3)

    def mean(self, cell: Cell, measure: Measure) -> np.ndarray:
        """The mean in each draw (D,): accuracy in percent, forwards, or useful tokens per forward of an answer."""
        return self._means_DCM[:, self._place[cell], ("accuracy", "nfe", "tpf").index(measure)]

    def difference(self, first: Cell, second: Cell, measure: Measure) -> np.ndarray:
        """The first cell's mean minus the second's in each draw (D,)."""
        return self.mean(first, measure) - self.mean(second, measure)

    def aup(self, curve: Sequence[Cell]) -> np.ndarray:
        """d3LLM's AUP of a curve in each draw (D,); its y_max is the best accuracy of all cells in that draw."""
        tpf_KD, accuracy_KD = (np.stack([self.mean(cell, name) for cell in curve]) for name in ("tpf", "accuracy"))
        return d3llm(*sorted_points(tpf_KD, accuracy_KD), self._best_D, alpha=ALPHA)

    @cached_property
    def _place(self) -> Mapping[Cell, int]:
        return {cell: number for number, cell in enumerate(self._cells)}

    @cached_property
    def _best_D(self) -> np.ndarray:
        return self._means_DCM[:, :, 0].max(axis=1)


class Bootstrap(Draws):
    """The rows themselves, then `num_draws` draws of seeds and problems."""

    def __init__(self, rows: PairedRows, *, num_draws: int = NUM_DRAWS, seed: int = 0) -> None:
        super().__init__(rows, weights(rows, num_draws=num_draws, seed=seed))


def each_seed(rows: PairedRows) -> Draws:
    """A draw for each training seed alone: the means are (S,), and an AUP's y_max is of that seed."""
    return Draws(rows, np.stack([rows.seed_P == number for number in range(len(rows.seeds))]))


def over_seeds(values_S: np.ndarray) -> Interval | None:
    """The mean of the seeds' values with Student's interval, which leaves their problems out; none for one seed."""
    if len(values_S) < 2:
        return None
    low, high = student_interval(values_S.tolist())
    return Interval(value=float(values_S.mean()), low=low, high=high)


def curves(rows: PairedRows) -> dict[tuple[str, int], list[Cell]]:
    """The cells of each recipe and buffer size, over the thresholds."""
    found: dict[tuple[str, int], list[Cell]] = {}
    for cell in rows.cells:
        found.setdefault((cell.recipe, cell.buffer_size), []).append(cell)
    return found


# Spearman's rank correlation of a few rows, with an exact permutation test and an interval of its measurement.

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
