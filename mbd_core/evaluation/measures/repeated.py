"""Several answers to a problem: pass@k and maj@k of a configuration, with intervals over draws of its problems."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mbd_core.evaluation.measures.rates import GradedSample
from mbd_core.evaluation.measures.statistics import Interval, mean_interval

MOST_SUBSETS = 200


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A configuration's numbers in percent, by k; `maj_at` is empty for programs, which have no equal answers.

    num_samples  the least number of answers that any of the `num_problems` has
    """

    num_problems: int
    num_samples: int
    pass_at: dict[int, Interval]
    maj_at: dict[int, Interval]


def measure_repeated(samples: Sequence[GradedSample], *, votes: bool) -> Repeated | None:
    """The numbers for k = 1, 2, 4, ... and all answers; `None` if no problem has several draws."""
    if not any(sample.draw for sample in samples):
        return None
    problems: dict[str, list[GradedSample]] = {}
    for sample in samples:
        problems.setdefault(sample.problem, []).append(sample)
    names, answers = list(problems), list(problems.values())
    fewest = min(map(len, answers))
    sizes = [*(2**power for power in range(fewest.bit_length()) if 2**power < fewest), fewest]

    def over_problems(values: list[float]) -> Interval:
        return mean_interval(100.0 * np.array(values), names)

    return Repeated(
        num_problems=len(names),
        num_samples=fewest,
        pass_at={
            k: over_problems(
                [
                    pass_at(len(problem_answers), sum(s.correct for s in problem_answers), k)
                    for problem_answers in answers
                ]
            )
            for k in sizes
        },
        maj_at={k: over_problems([maj_at(problem_answers, k) for problem_answers in answers]) for k in sizes}
        if votes
        else {},
    )


def pass_at(num_samples: int, num_right: int, k: int) -> float:
    """The chance that one of `k` answers is right, estimated without bias from all answers (Chen et al. 2021, Eq.
    1)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def maj_at(samples: Sequence[GradedSample], k: int) -> float:
    """The chance that the answer with the most votes among `k` is right, over all choices of `k` answers, or over
    `MOST_SUBSETS` drawn choices if there are more. Answers with equally many votes have equal chances. A text without
    an answer has no vote."""
    if math.comb(len(samples), k) <= MOST_SUBSETS:
        subsets = list(itertools.combinations(samples, k))
    else:
        generator = random.Random(f"{samples[0].problem} {k}")
        subsets = [tuple(generator.sample(list(samples), k)) for _ in range(MOST_SUBSETS)]
    return sum(map(_majority, subsets)) / len(subsets)


def _majority(samples: Sequence[GradedSample]) -> float:
    votes = Counter(sample.vote for sample in samples if sample.vote is not None)
    if not votes:
        return 0.0
    most_votes = max(votes.values())
    winners = [vote for vote, count in votes.items() if count == most_votes]
    right = {sample.vote for sample in samples if sample.correct}
    return sum(winner in right for winner in winners) / len(winners)
