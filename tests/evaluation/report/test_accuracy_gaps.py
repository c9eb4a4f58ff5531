"""Differences in accuracy are taken problem by problem, against the first model and method's best configuration."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sweep_rows import graded_sample

from mbd_core.evaluation.measures.rates import GradedSample
from mbd_core.evaluation.measures.statistics import wilson_interval
from mbd_core.evaluation.measures.summary import ReportKey, build_rows
from mbd_core.evaluation.report.accuracy_gaps import accuracy_gaps, gap_table
from mbd_core.evaluation.report.contents import SweepNumbers, report_tables


def answers(right: Sequence[bool], *, first: int = 0) -> list[GradedSample]:
    numbered = enumerate(right, start=first)
    return [graded_sample(tokens=8, forwards=4, correct=ok, problem=f"p{number}") for number, ok in numbered]


def key(model: str, tau: float = 0.9) -> ReportKey:
    return ReportKey(model, "MBD", "a", json.dumps({"block_size": 8, "tau_m2t": tau}))


def test_a_difference_on_the_same_problems_is_narrower_than_its_accuracies() -> None:
    hard = [number % 2 == 0 for number in range(400)]
    better = [ok or number % 40 == 1 for number, ok in enumerate(hard)]
    samples = {key("base"): answers(hard), key("other"): answers(better)}
    ((found, gap),) = accuracy_gaps(build_rows(samples), samples).items()
    assert found == key("other") and gap.baseline == key("base") and gap.num_problems == 400
    assert (gap.only_it, gap.only_base, gap.difference) == (10, 0, pytest.approx(2.5))
    assert gap.low is not None and gap.high is not None
    assert 0 < gap.low < 2.5 < gap.high and gap.p_value == pytest.approx(2 / 2**10)
    low, high = wilson_interval(200, 400)
    assert gap.high - gap.low < 100 * (high - low) / 2
    again = accuracy_gaps(build_rows(samples), samples)
    assert again[found] == gap, "the same rows give the same interval"


def test_the_baseline_is_the_first_model_s_best_and_only_shared_problems_count() -> None:
    samples = {
        key("base", 0.7): answers([True] * 2 + [False] * 8),
        key("base", 0.9): answers([True] * 5 + [False] * 5),
        key("other"): answers([False] * 4, first=3),
        key("apart"): answers([True] * 4, first=20),
    }
    gaps = accuracy_gaps(build_rows(samples), samples)
    assert {gap.baseline for gap in gaps.values()} == {key("base", 0.9)}
    assert list(gaps) == [key("base", 0.7), key("other")]
    assert gaps[key("base", 0.7)].difference == pytest.approx(-30)
    assert (gaps[key("other")].num_problems, gaps[key("other")].only_base) == (4, 2)


def test_seeds_of_a_problem_are_paired_and_drawn_together() -> None:
    def seeded(right: Sequence[bool], seed: int) -> list[GradedSample]:
        return [replace(sample, seed=seed) for sample in answers(right)]

    base, other = [number % 2 == 0 for number in range(20)], [number % 3 == 0 for number in range(20)]
    (once,), (often,) = (
        accuracy_gaps(build_rows(samples), samples).values()
        for seeds in (1, 5)
        for samples in [
            {
                key(model): [sample for seed in range(seeds) for sample in seeded(right, seed)]
                for model, right in (("base", base), ("other", other))
            }
        ]
    )
    assert often == once and once.num_problems == 20, "five times the same answers say no more"
    samples = {key("base"): seeded([True], 0) + seeded([False], 1), key("other"): seeded([False], 1)}
    (gap,) = accuracy_gaps(build_rows(samples), samples).values()
    assert (gap.num_problems, gap.only_base, gap.difference) == (1, 0, 0.0), "both are wrong under seed 1"
    assert gap.low is gap.high is None


def test_the_section_names_the_baseline_and_is_left_out_without_differences() -> None:
    samples = {key("base", 0.7): answers([True, False]), key("base", 0.9): answers([True, True])}
    rows = build_rows(samples)
    table = gap_table(accuracy_gaps(rows, samples), {"a": "A"}, {row.key: row.varied for row in rows})
    assert table.lead[1] == ["A: base, MBD, tau_m2t=0.9"]
    assert table.rows == [["base", "MBD", "A", "tau_m2t=0.7", 2, 0, 1, "-50.00 [-100.00, +0.00]", "1.000"]]
    without = report_tables(SweepNumbers(rows=rows, labels={"a": "A"}, settings={}))
    assert table.title not in {one.title for one in without}
