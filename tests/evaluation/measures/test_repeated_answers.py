"""pass@k and maj@k: literal loops over all choices of k answers, and intervals over whole problems."""

import itertools
import random

import numpy as np
import pytest
from sweep_rows import graded_sample

from mbd_core.evaluation.measures.rates import GradedSample, summarize
from mbd_core.evaluation.measures.repeated import maj_at, measure_repeated, pass_at
from mbd_core.evaluation.measures.statistics import mean_interval


def drawn(problem: str, votes: list[str | None], right: str = "7") -> list[GradedSample]:
    return [
        GradedSample(
            problem=problem,
            correct=vote == right,
            counts=graded_sample(tokens=8, forwards=4, correct=True, problem=problem).counts,
            draw=number,
            vote=vote,
        )
        for number, vote in enumerate(votes)
    ]


@pytest.mark.parametrize("num_right", range(7))
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(num_right: int) -> None:
    flags = [number < num_right for number in range(6)]
    for k in range(1, 7):
        choices = list(itertools.combinations(flags, k))
        assert pass_at(6, num_right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_the_majority_is_counted_in_every_choice_and_ties_share() -> None:
    votes = ["7", "7", "3", None, "5"]
    samples = drawn("p", votes)
    for k in range(1, 6):
        credit = []
        for choice in itertools.combinations(votes, k):
            known = [vote for vote in choice if vote is not None]
            most = max((known.count(vote) for vote in known), default=0)
            winners = {vote for vote in known if known.count(vote) == most}
            credit.append(("7" in winners) / len(winners) if winners else 0.0)
        assert maj_at(samples, k) == pytest.approx(sum(credit) / len(credit))
    assert maj_at(samples, 5) == 1.0 and maj_at(drawn("p", [None, None]), 2) == 0.0


def test_many_choices_are_drawn_and_the_same_again() -> None:
    samples = drawn("p", [random.Random(n).choice("735") for n in range(20)])
    assert maj_at(samples, 10) == maj_at(samples, 10)


def test_intervals_are_of_whole_problems_and_a_greedy_sweep_has_none_of_this() -> None:
    samples = [one for n in range(8) for one in drawn(f"p/{n}", ["7"] * (n % 5) + ["3"] * (4 - n % 5))]
    measured = measure_repeated(samples, votes=True)
    assert measured is not None and list(measured.pass_at) == list(measured.maj_at) == [1, 2, 4]
    assert (measured.num_problems, measured.num_samples) == (8, 4)
    summary = summarize(samples)
    by_problem = mean_interval(100.0 * np.array([s.correct for s in samples]), [s.problem for s in samples])
    assert measured.pass_at[1] == by_problem and by_problem.bounds == (summary.accuracy_low, summary.accuracy_high)
    assert measured.pass_at[4].value == 75.0 and measured.pass_at[2].value > measured.pass_at[1].value
    greedy = [graded_sample(tokens=8, forwards=4, correct=True, problem=f"p/{n}") for n in range(3)]
    assert measure_repeated(greedy, votes=False) is None
