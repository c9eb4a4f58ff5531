"""How far a configuration's accuracy lies from its task's baseline, problem by problem: the paired bootstrap.

Two accuracies on the same problems are not independent, so their own intervals say too little of their difference:
both tend to be right on the easy problems and wrong on the hard problems. Drawing problems, each with both answers,
keeps this dependence.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mbd_core.evaluation.measures.rates import GradedSample
from mbd_core.evaluation.measures.statistics import mean_interval, p_text, sign_test, wins_and_losses
from mbd_core.evaluation.measures.summary import ReportKey, ReportRow, best_row
from mbd_core.evaluation.report.metrics import SUBJECT
from mbd_core.tables import Table

HEADS = (*SUBJECT, "Problems", "Only it", "Only the baseline", "Difference [95 %]", "p")
DEFINITIONS = (
    "Difference: accuracy minus that of the task's baseline on the same problems, in percentage points, with "
    "percentiles of 2,000 draws of problems (paired bootstrap), all seeds of a problem together. A single problem "
    "has no interval. If no answer differs, the interval has no width, which is no certainty. The columns 'Only it' "
    "and 'Only the baseline' count the problems on which only one of the two is right, or is right under more seeds. "
    "p is the two-sided sign test of these counts, for each row by itself. With many rows some differences are clear "
    "by chance. The baseline is the most accurate configuration of the report's first model and method. It was "
    "chosen on these samples, which biases differences from it downwards:"
)
RightByDraw = Mapping[tuple[str, int, int], bool]  # by problem, seed and number


@dataclass(frozen=True, kw_only=True)
class AccuracyGap:
    """A configuration's accuracy minus its baseline's on the same problems, in percentage points.

    num_problems        problems that both have under the same seed
    only_it, only_base  problems on which only one of the two is right, or is right under more seeds
    low, high           `None` if there is a single problem
    """

    baseline: ReportKey
    num_problems: int
    only_it: int
    only_base: int
    difference: float
    low: float | None
    high: float | None
    p_value: float


def accuracy_gaps(
    rows: Sequence[ReportRow], samples: Mapping[ReportKey, Sequence[GradedSample]]
) -> dict[ReportKey, AccuracyGap]:
    """The gaps of all configurations that share a problem with their baseline."""
    gaps: dict[ReportKey, AccuracyGap] = {}
    for task in dict.fromkeys(row.key.task for row in rows):
        of_task = [row for row in rows if row.key.task == task]
        first = [row for row in of_task if (row.key.model, row.key.method) == _method(of_task[0])]
        baseline = best_row(first).key
        base = _answers(samples[baseline])
        for row in of_task:
            if row.key != baseline and (gap := _gap(baseline, base, _answers(samples[row.key]))) is not None:
                gaps[row.key] = gap
    return gaps


def _method(row: ReportRow) -> tuple[str, str]:
    return row.key.model, row.key.method


def _answers(samples: Sequence[GradedSample]) -> RightByDraw:
    """Whether each answer is right, by problem, seed, and number among the answers of that problem and seed."""
    answers: dict[tuple[str, int, int], bool] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for sample in samples:
        question = (sample.problem, sample.seed)
        answers[*question, counts[question]] = sample.correct
        counts[question] += 1
    return answers


def _gap(baseline: ReportKey, base: RightByDraw, answers: RightByDraw) -> AccuracyGap | None:
    keys_of_both = sorted(base.keys() & answers.keys())
    if not keys_of_both:
        return None
    problems = [problem for problem, _, _ in keys_of_both]
    differences = [100.0 * (answers[key] - base[key]) for key in keys_of_both]
    only_it, only_base = wins_and_losses(zip(problems, differences, strict=True))
    difference = mean_interval(np.array(differences), problems)
    return AccuracyGap(
        baseline=baseline,
        num_problems=len(set(problems)),
        only_it=only_it,
        only_base=only_base,
        difference=difference.value,
        low=difference.low,
        high=difference.high,
        p_value=sign_test(only_it, only_base),
    )


def gap_table(
    gaps: Mapping[ReportKey, AccuracyGap], labels: Mapping[str, str], varied: Mapping[ReportKey, str]
) -> Table:
    """The differences; `varied` has the settings in which configurations differ."""
    baselines = {labels[gap.baseline.task]: gap.baseline for gap in gaps.values()}
    return Table(
        title="Differences in accuracy",
        lead=(
            DEFINITIONS,
            [
                f"{label}: {', '.join(filter(None, (key.model, key.method, varied[key])))}"
                for label, key in baselines.items()
            ],
        ),
        columns=HEADS,
        numeric=range(4, len(HEADS)),
        rows=[
            [
                *(key.model, key.method, labels[key.task], varied[key] or None),
                *(gap.num_problems, gap.only_it, gap.only_base),
                f"{gap.difference:+.2f}" + ("" if gap.low is None else f" [{gap.low:+.2f}, {gap.high:+.2f}]"),
                p_text(gap.p_value),
            ]
            for key, gap in gaps.items()
        ],
    )
