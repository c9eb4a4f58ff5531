"""Rates computed from raw counts: accuracy, TPF and NFE over the samples of one configuration.

Samples have no seconds: their batches mix configurations. `batch/timing.py` has the seconds of timed runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mbd_core.evaluation.measures.statistics import Interval, mean_and_stderr, mean_interval, percent_right

Rule = Literal["strict", "flexible", "base", "plus"]
RULES: tuple[Rule, ...] = ("strict", "flexible", "base", "plus")


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """The counts of one request (`decoding.request.Counts`) that do not depend on the rest of its batch. `None`: the
    endpoint does not report the count."""

    num_prompt_tokens: int | None
    num_tokens: int | None
    num_forwards: int | None
    num_store_forwards: int | None
    num_prefill_forwards: int | None
    num_drafted_tokens: int | None = None
    num_confirmed_tokens: int | None = None
    num_positions: int | None = None

    @property
    def tpf(self) -> float | None:
        """Useful tokens per forward."""
        if self.num_tokens is None or self.num_forwards is None:
            return None
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0


@dataclass(frozen=True, kw_only=True)
class GradedSample:
    """One graded request. `counts` is `None` if decoding failed, for the reason in `error`; such a sample counts as
    wrong.

    problem  the problem's id
    cut      whether the answer ended at the limit of its tokens
    is_bare  whether forwards are unknown: the endpoint does not report them, or the sample compares log-likelihoods
    seed     the sweep's seed; under several seeds a problem has several samples
    draw     the answer's number among the drawn answers to its problem; `None` in a greedy sweep
    vote     for a drawn math answer, the first answer to the problem that the grader takes as equal
    """

    problem: str
    correct: bool
    counts: SampleCounts | None
    cut: bool = False
    strict_correct: bool | None = None
    flexible_correct: bool | None = None
    base_correct: bool | None = None
    plus_correct: bool | None = None
    is_bare: bool = False
    seed: int = 0
    draw: int | None = None
    vote: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a configuration on `n` samples.

    accuracy           percent right of all `n`, errors counted as wrong; `accuracy_low` and `accuracy_high` bound the
                       95 % interval: Wilson's, or a bootstrap over problems if these have several draws
    by_rule            the accuracy by each rule that judged a sample: strict and flexible extraction, or EvalPlus's
                       base inputs, and its base and plus inputs; a sample that a rule did not judge is wrong
    tpf                mean over samples of useful tokens per forward; `tpf_stderr` the standard error of that mean,
                       in which several answers to a problem are not independent
    tpf_ratio_of_sums  all useful tokens / all forwards
    nfe                mean forwards per sample; `nfe_stderr` the standard error of that mean
    tokens             mean useful tokens per sample; `tokens_stderr` the standard error of that mean
    positions          computed positions of all samples / all forwards; `None` also if a folder does not have them
    cut                answers that ended at the limit of their tokens
    errors             samples without counts; they do not enter tpf and nfe

    A number is `None` if the endpoint did not report it for every sample.
    """

    n: int
    cut: int
    errors: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    by_rule: Mapping[Rule, Interval]
    tpf: float | None
    tpf_stderr: float | None
    tpf_ratio_of_sums: float | None
    nfe: float | None
    nfe_stderr: float | None
    tokens: float | None
    tokens_stderr: float | None
    num_tokens: int | None
    num_forwards: int | None
    num_store_forwards: int | None
    num_prefill_forwards: int | None
    num_drafted_tokens: int | None = None
    num_confirmed_tokens: int | None = None
    num_positions: int | None = None
    positions: float | None = None


def summarize(samples: Sequence[GradedSample]) -> Summary:
    """The summary of one configuration's samples; `ValueError` without samples. A rate with denominator 0 is 0."""
    if not samples:
        raise ValueError("nothing to summarise: no samples")
    n = len(samples)
    counts = [s.counts for s in samples if s.counts is not None]
    problems = [s.problem for s in samples if s.counts is not None]
    accuracy = _percent_right(samples, [s.correct for s in samples])
    accuracy_low, accuracy_high = accuracy.bounds
    verdicts = {rule: [getattr(s, f"{rule}_correct") for s in samples] for rule in RULES}
    bare = any(s.is_bare for s in samples)
    totals = {name: _total(counts, name, bare=bare) for name in TOTALS}
    tokens, forwards, positions = (totals[name] for name in ("num_tokens", "num_forwards", "num_positions"))
    tpf, tpf_stderr = _mean([c.tpf for c in counts], problems, bare=bare)
    nfe, nfe_stderr = _mean([c.num_forwards for c in counts], problems, bare=bare)
    mean_tokens, tokens_stderr = _mean([c.num_tokens for c in counts], problems, bare=bare and not counts)
    return Summary(
        n=n,
        cut=sum(s.cut for s in samples),
        errors=n - len(counts),
        accuracy=accuracy.value,
        accuracy_low=accuracy_low,
        accuracy_high=accuracy_high,
        by_rule={
            rule: _percent_right(samples, flags)
            for rule, flags in verdicts.items()
            if any(f is not None for f in flags)
        },
        tpf=tpf,
        tpf_stderr=tpf_stderr,
        tpf_ratio_of_sums=None if tpf is None else (tokens or 0) / forwards if forwards else 0.0,
        nfe=nfe,
        nfe_stderr=nfe_stderr,
        tokens=mean_tokens,
        tokens_stderr=tokens_stderr,
        positions=positions / forwards if positions and forwards else None,
        **totals,
    )


def _percent_right(samples: Sequence[GradedSample], flags: Sequence[bool | None]) -> Interval:
    """The percentage right. Several answers to one problem are not independent, so the bootstrap draws problems with
    all their answers. A single problem has the interval of its answers."""
    problems = [s.problem for s in samples]
    if not any(s.draw for s in samples) or len(set(problems)) < 2:
        return percent_right(flags)
    return mean_interval(100.0 * np.array([bool(flag) for flag in flags]), problems)


TOTALS = (
    *("num_tokens", "num_forwards", "num_store_forwards", "num_prefill_forwards"),
    *("num_drafted_tokens", "num_confirmed_tokens", "num_positions"),
)


def _mean(values: Sequence[float | None], problems: Sequence[str], *, bare: bool) -> tuple[float | None, float | None]:
    """The mean and its standard error; `None` if a value is unknown."""
    numbers = [value for value in values if value is not None]
    return (None, None) if bare or len(numbers) < len(values) else mean_and_stderr(numbers, problems)


def _total(counts: Sequence[SampleCounts], name: str, *, bare: bool) -> int | None:
    """The sum of a count; `None` if a sample lacks the count, or if no sample of a bare sweep has counts."""
    values: list[int | None] = [getattr(c, name) for c in counts]
    if None in values or (bare and not values):
        return None
    return sum(value for value in values if value is not None)
