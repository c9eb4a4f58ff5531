"""Configurations and models compared on the same problems: paired differences, and answers that only one has right.

Two accuracies on the same problems are not independent, so their own intervals say too little of their difference:
both are right on the easy problems and wrong on the hard ones. Drawing problems, with both answers, keeps that.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mbd_core.evaluation.measures.rates import GradedSample
from mbd_core.evaluation.measures.statistics import Interval, mean_interval, p_text, sign_test, wins_and_losses
from mbd_core.evaluation.measures.summary import ReportKey, ReportRow, best_row
from mbd_core.evaluation.report.metrics import SUBJECT
from mbd_core.evaluation.sweep.folder import read_samples
from mbd_core.tables import Table

# How far a configuration's accuracy lies from its task's baseline, problem by problem: the paired bootstrap.

HEADS = (*SUBJECT, "Problems", "Only it", "Only the baseline", "Difference [95 %]", "p")
DEFINITIONS = (
    "Difference: accuracy minus that of the task's baseline on the same problems, in percentage points, with "
    "percentiles of 2,000 draws of problems (paired bootstrap), all seeds of a problem together. A single problem "
    "has none; where no answer differs a bootstrap has no width, which is no certainty. Only it, only the baseline: "
    "problems on which one of the two alone is right (of several seeds, on more of them); p: two-sided sign test of "
    "these counts, for each row by itself. With many rows some differences are clear by chance. The baseline is the "
    "most accurate configuration of the report's first model and method, chosen on these samples, which biases "
    "differences from it downwards:"
)
RightByDraw = Mapping[tuple[str, int, int], bool]  # by problem, seed and number


@dataclass(frozen=True, kw_only=True)
class AccuracyGap:
    """A configuration's accuracy minus its baseline's on the same problems, in percentage points.

    num_problems        problems that both have under the same seed
    only_it, only_base  those on which one of the two alone is right, or under more seeds
    low, high           `None` of a single problem
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
    """The gap of every configuration but the baselines; none where it shares no problem with its baseline."""
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
    """Whether each problem is right under each seed; samples that agree in both count in their order."""
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


# Two models on the same problems: how often only one of them is right, and how their tokens per forward differ.


@dataclass(frozen=True)
class GradedAnswer:
    """One graded answer; `num_forwards` is 0 for one that could not be decoded."""

    correct: bool
    num_tokens: int
    num_forwards: int

    @property
    def tpf(self) -> float:
        """Useful tokens per forward, of an answer that was decoded."""
        return self.num_tokens / self.num_forwards


SharedProblems = Mapping[tuple[Any, ...], GradedAnswer]  # by seed, problem and, of drawn answers, number


@dataclass(frozen=True, kw_only=True)
class PairedAnswers:
    """Two models on the same problems.

    first_only, second_only  problems on which only the first model, or only the second, is right, or under more seeds
    num_decoded              answers that both could decode
    accuracy                 mean difference, first model minus second, in percentage points, over all answers
    tpf, nfe                 likewise useful tokens per forward, and forwards, over decoded answers; `None` without one
    """

    num_problems: int
    first_only: int
    second_only: int
    num_decoded: int
    accuracy: Interval
    tpf: Interval | None
    nfe: Interval | None

    @property
    def p_value(self) -> float:
        """The p-value of the two-sided sign test."""
        return sign_test(self.first_only, self.second_only)


def load_answers(
    folders: Sequence[Path], *, model: str, task: str, tau_m2t: float, buffer_size: int
) -> SharedProblems:
    """The answers by (seed, problem), for one model and configuration; `ValueError` if none exists, or if the answers
    are of several configurations or methods."""
    answers: dict[tuple[Any, ...], GradedAnswer] = {}
    variants: set[tuple[str, str]] = set()
    for folder in folders:
        for row in read_samples(folder):
            config = json.loads(row["config"])
            setting = (row["model"], row["task"], config.get("tau_m2t"), config.get("buffer_size"))
            if setting == (model, task, tau_m2t, buffer_size):
                answer = GradedAnswer(bool(row["correct"]), row["num_tokens"] or 0, row["num_forwards"] or 0)
                draw = () if row.get("draw") is None else (row["draw"],)
                answers[(row["seed"], row["problem_id"], *draw)] = answer
                variants.add((row["method"], row["config"]))
    if len(variants) > 1:
        names = "; ".join(f"{method} {config}" for method, config in sorted(variants))
        raise ValueError(
            f"{len(variants)} configurations of {model} on {task} have tau_m2t={tau_m2t}, buffer_size={buffer_size}; "
            f"give folders that hold one of them: {names}"
        )
    if not answers:
        raise ValueError(
            f"no samples of {model} on {task} at tau_m2t={tau_m2t}, buffer_size={buffer_size} in "
            f"{', '.join(map(str, folders))}"
        )
    return answers


def pair_answers(first: SharedProblems, second: SharedProblems) -> PairedAnswers:
    """Compare answers problem by problem; `ValueError` if the problems are not the same."""
    if first.keys() != second.keys():
        raise ValueError(
            f"the two sides hold different problems ({len(first)} and {len(second)}); sweep the same seeds"
        )
    keys = sorted(first, key=lambda key: key[1])
    right = [(key[1], 100.0 * (first[key].correct - second[key].correct)) for key in keys]
    decoded = [key for key in keys if first[key].num_forwards and second[key].num_forwards]
    first_only, second_only = wins_and_losses(right)
    return PairedAnswers(
        num_problems=len({problem for _, problem in keys}),
        first_only=first_only,
        second_only=second_only,
        num_decoded=len(decoded),
        accuracy=_difference(right),
        tpf=_difference([(key[1], first[key].tpf - second[key].tpf) for key in decoded]) if decoded else None,
        nfe=_difference([(key[1], float(first[key].num_forwards - second[key].num_forwards)) for key in decoded])
        if decoded
        else None,
    )


def _difference(differences: Sequence[tuple[str, float]]) -> Interval:
    return mean_interval(np.array([value for _, value in differences]), [problem for problem, _ in differences])
