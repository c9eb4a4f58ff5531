"""Rates computed from raw counts: accuracy, TPF and NFE over the samples of one configuration.

Samples have no seconds: their batches mix configurations. `speed.py` has those of timed runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mbd_core.evaluation.statistics import mean_and_stderr, wilson_interval


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """The counts of one request (`decoding.request.Counts`) that do not depend on what ran beside it."""

    num_prompt_tokens: int
    num_tokens: int
    num_forwards: int
    num_store_forwards: int
    num_prefill_forwards: int

    @property
    def tpf(self) -> float:
        """Useful tokens per forward."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0


@dataclass(frozen=True, kw_only=True)
class GradedSample:
    """One graded request. `counts` is `None` if decoding failed; such a sample is an error and counts as wrong.

    problem  the id of its problem
    cut      whether the answer ended at the limit of its tokens
    """

    problem: str
    correct: bool
    counts: SampleCounts | None
    cut: bool = False
    strict_correct: bool | None = None
    flexible_correct: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The results of a configuration on `n` samples.

    accuracy           percent right of all `n`, errors counted as wrong; `accuracy_low` and `accuracy_high` are the
                       bounds of its 95 % Wilson interval
    accuracy_strict    percent right by strict extraction, `None` if the task has no extraction; likewise _flexible
    tpf                mean over samples of useful tokens per forward; `tpf_stderr` the standard error of that mean
    tpf_ratio_of_sums  all useful tokens / all forwards
    nfe                mean forwards per sample; `nfe_stderr` the standard error of that mean
    tokens             mean useful tokens per sample; `tokens_stderr` likewise
    cut                answers that ended at the limit of their tokens
    errors             samples without counts; they do not enter tpf and nfe
    """

    n: int
    cut: int
    errors: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    accuracy_strict: float | None
    accuracy_flexible: float | None
    tpf: float
    tpf_stderr: float
    tpf_ratio_of_sums: float
    nfe: float
    nfe_stderr: float
    tokens: float
    tokens_stderr: float
    num_tokens: int
    num_forwards: int
    num_store_forwards: int
    num_prefill_forwards: int


def summarize(samples: Sequence[GradedSample]) -> Summary:
    """The summary of one configuration's samples; `ValueError` without samples. A rate with denominator 0 is 0."""
    if not samples:
        raise ValueError("nothing to summarise: no samples")
    n = len(samples)
    counts = [s.counts for s in samples if s.counts is not None]
    num_correct = sum(s.correct for s in samples)
    low, high = wilson_interval(num_correct, n)
    tokens = sum(c.num_tokens for c in counts)
    forwards = sum(c.num_forwards for c in counts)
    tpf, tpf_stderr = mean_and_stderr([c.tpf for c in counts])
    nfe, nfe_stderr = mean_and_stderr([c.num_forwards for c in counts])
    mean_tokens, tokens_stderr = mean_and_stderr([c.num_tokens for c in counts])
    return Summary(
        n=n,
        cut=sum(s.cut for s in samples),
        errors=n - len(counts),
        accuracy=100 * num_correct / n,
        accuracy_low=100 * low,
        accuracy_high=100 * high,
        accuracy_strict=_percent([s.strict_correct for s in samples]),
        accuracy_flexible=_percent([s.flexible_correct for s in samples]),
        tpf=tpf,
        tpf_stderr=tpf_stderr,
        tpf_ratio_of_sums=tokens / forwards if forwards else 0.0,
        nfe=nfe,
        nfe_stderr=nfe_stderr,
        tokens=mean_tokens,
        tokens_stderr=tokens_stderr,
        num_tokens=tokens,
        num_forwards=forwards,
        num_store_forwards=sum(c.num_store_forwards for c in counts),
        num_prefill_forwards=sum(c.num_prefill_forwards for c in counts),
    )


def _percent(flags: Sequence[bool | None]) -> float | None:
    if all(flag is None for flag in flags):
        return None
    return 100 * sum(bool(flag) for flag in flags) / len(flags)
