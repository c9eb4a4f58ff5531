"""Rates over samples: hand-computed values, and what an error changes."""

from dataclasses import replace

import pytest
from sweep_rows import graded_sample

from mbd_core.evaluation.measures.rates import GradedSample, summarize


def test_mean_of_ratios_and_ratio_of_sums_are_different_numbers() -> None:
    found = summarize(
        [
            graded_sample(tokens=10, forwards=10),
            graded_sample(tokens=90, forwards=30, correct=False),
        ]
    )
    assert found.tpf == pytest.approx(2.0)
    assert found.tpf_ratio_of_sums == pytest.approx(2.5)
    assert found.nfe == pytest.approx(20.0)
    assert found.accuracy == 50.0
    assert (found.accuracy_low, found.accuracy_high) == pytest.approx((9.4531, 90.5469), abs=1e-3)
    assert found.tpf_stderr == pytest.approx(1.0)


def test_an_error_is_wrong_and_leaves_the_rates_alone() -> None:
    good = [graded_sample(tokens=12, forwards=4)] * 3
    failed = GradedSample(problem="p", correct=False, counts=None)
    alone, beside = summarize(good), summarize([*good, failed])
    assert (beside.n, beside.errors, beside.accuracy) == (4, 1, 75.0)
    assert (beside.cut, summarize([*good, replace(good[0], cut=True)]).cut) == (0, 1)
    assert (beside.tpf, beside.nfe) == (alone.tpf, alone.nfe)
    assert summarize([failed]).tpf == 0.0
    with pytest.raises(ValueError):
        summarize([])


def test_both_extractions_have_an_accuracy() -> None:
    math_samples = [
        GradedSample(problem="p", correct=True, counts=None, strict_correct=True, flexible_correct=flag)
        for flag in (1, 0)
    ]
    found = summarize(math_samples).by_rule
    assert (list(found), found["strict"].value, found["flexible"].value) == (["strict", "flexible"], 100.0, 50.0)
    assert summarize([graded_sample(tokens=1, forwards=1)]).by_rule == {}


def test_base_and_plus_have_accuracies_with_intervals_and_what_was_not_judged_is_wrong() -> None:
    judged = [
        GradedSample(problem="p", correct=plus is True, counts=None, base_correct=base, plus_correct=plus)
        for base, plus in ((True, True), (True, False), (True, False), (None, None))
    ]
    found = summarize(judged).by_rule
    assert list(found) == ["base", "plus"]
    assert (found["base"].value, found["base"].low, found["base"].high) == pytest.approx(
        (75, 30.0642, 95.4413), abs=1e-3
    )
    assert (found["plus"].value, found["plus"].low, found["plus"].high) == pytest.approx(
        (25, 4.5587, 69.9358), abs=1e-3
    )
