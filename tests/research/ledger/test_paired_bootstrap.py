"""The statistics of a study against values that are known: McNemar's p, and intervals that a formula gives."""

import math

import numpy as np
import pytest

from mbd_core.evaluation.measures.aup import aup_d3llm
from mbd_core.evaluation.measures.statistics import Interval, student_interval
from research.ledger.rows import PairedRows, StudyCell, bootstrap_means, each_seed, mcnemar

ONE, OTHER = StudyCell("one", 2, 0.9), StudyCell("other", 2, 0.9)


def rows(
    correct: dict[StudyCell, list[float]],
    *,
    forwards: dict[StudyCell, list[float]] | None = None,
    seeds: list[int] | None = None,
) -> PairedRows:
    """The cells' answers to the same problems, each of 60 tokens, by default in 20 forwards, all of one seed."""
    count = len(next(iter(correct.values())))
    there = np.array(seeds or [0] * count)
    counts = forwards or {cell: [20.0] * count for cell in correct}
    return PairedRows(
        seeds=tuple(range(there.max() + 1)),
        seed_P=there,
        correct={cell: np.array(values, dtype=float) for cell, values in correct.items()},
        forwards={cell: np.array(values, dtype=float) for cell, values in counts.items()},
        tokens={cell: np.full(count, 60.0) for cell in correct},
    )


@pytest.mark.parametrize(("first_only", "second_only", "p"), [(10, 2, 0.03857421875), (5, 5, 1.0), (0, 6, 0.03125)])
def test_mcnemar_is_the_exact_binomial_test(first_only: int, second_only: int, p: float) -> None:
    one = [1.0] * first_only + [0.0] * second_only + [1.0] * 7 + [0.0] * 3
    other = [0.0] * first_only + [1.0] * second_only + [1.0] * 7 + [0.0] * 3
    test = mcnemar(rows({ONE: one, OTHER: other}), ONE, OTHER)
    assert (test.first_only, test.second_only) == (first_only, second_only)
    assert test.p_value == pytest.approx(p)


def test_of_one_seed_the_interval_is_that_of_a_share() -> None:
    right = [1.0] * 700 + [0.0] * 300
    found = Interval.of_weightings(bootstrap_means(rows({ONE: right}), num_draws=4000).mean(ONE, "accuracy"))
    half = 1.96 * math.sqrt(0.7 * 0.3 / 1000) * 100
    assert found.value == pytest.approx(70.0)
    assert found.low == pytest.approx(70 - half, abs=0.25) and found.high == pytest.approx(70 + half, abs=0.25)


def test_differences_are_paired_by_problem() -> None:
    generator = np.random.default_rng(0)
    hard = generator.integers(10, 60, size=200).astype(float)
    forwards = {ONE: (hard - 3).tolist(), OTHER: hard.tolist()}
    bootstrap = bootstrap_means(rows({ONE: [1.0] * 200, OTHER: [1.0] * 200}, forwards=forwards), num_draws=300)
    alone = Interval.of_weightings(bootstrap.mean(ONE, "nfe"))
    paired = Interval.of_weightings(bootstrap.difference(ONE, OTHER, "nfe"))
    assert alone.high - alone.low > 1.0
    assert (paired.value, paired.low, paired.high) == pytest.approx((-3.0, -3.0, -3.0))


def test_seeds_that_disagree_widen_the_interval() -> None:
    """Three runs whose accuracy is 60, 80 and 100 %: many problems do not make one number of them."""
    right: list[float] = []
    for share in (0.6, 0.8, 1.0):
        right += [1.0] * round(500 * share) + [0.0] * round(500 * (1 - share))
    seeds = [number for number in range(3) for _ in range(500)]
    over_seeds = Interval.of_weightings(
        bootstrap_means(rows({ONE: right}, seeds=seeds), num_draws=1000).mean(ONE, "accuracy")
    )
    over_problems = Interval.of_weightings(bootstrap_means(rows({ONE: right}), num_draws=1000).mean(ONE, "accuracy"))
    assert over_problems.high - over_problems.low < 5 < 20 < over_seeds.high - over_seeds.low
    assert over_seeds.low == pytest.approx(60, abs=5) and over_seeds.high == pytest.approx(100, abs=5)


def test_over_three_seeds_students_interval_goes_beyond_the_worst_of_them() -> None:
    right: list[float] = []
    for share in (0.6, 0.8, 1.0):
        right += [1.0] * round(50 * share) + [0.0] * round(50 * (1 - share))
    data = rows({ONE: right}, seeds=[number for number in range(3) for _ in range(50)])
    means = each_seed(data).mean(ONE, "accuracy")
    assert means.tolist() == pytest.approx([60.0, 80.0, 100.0])
    found = student_interval(means.tolist())
    assert found is not None
    half = 4.3027 * 20 / math.sqrt(3)  # 20: the sample's standard deviation
    assert (found.value, found.low, found.high) == pytest.approx((80.0, 80 - half, 80 + half), rel=1e-3)


def test_the_first_draw_is_the_rows_themselves() -> None:
    data = rows({ONE: [1.0, 0.0] * 6}, seeds=[0] * 4 + [1] * 4 + [2] * 4)
    means = bootstrap_means(data, num_draws=50).mean(ONE, "accuracy")
    assert means.shape == (51,) and means[0] == 50.0 and means.std() > 0


def test_an_aup_of_the_rows_is_that_of_their_points() -> None:
    cells = [StudyCell("one", 2, tau) for tau in (0.7, 0.8, 0.9)]
    right = {cells[0]: [1.0] * 6 + [0.0] * 4, cells[1]: [1.0] * 8 + [0.0] * 2, cells[2]: [1.0] * 9 + [0.0]}
    forwards = {cell: [count] * 10 for cell, count in zip(cells, (10.0, 12.0, 20.0), strict=True)}
    data = rows(right, forwards=forwards)
    (curve,) = data.curves.values()
    points = [(6.0, 60.0), (5.0, 80.0), (3.0, 90.0)]
    expected = aup_d3llm(points, y_max=90.0)
    assert bootstrap_means(data, num_draws=20).aup(curve)[0] == pytest.approx(expected)
