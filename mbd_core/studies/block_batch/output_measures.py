"""The effect of the block length on the output: the per-sample oracle, bifurcations, consensus.

The outputs of one sample are {block length: generated token ids}; in tokens, a bifurcation is a position of the
canvas. Sources: the BlockBatch paper, Figures 2 and 4 and Table 5.

Shape legend: S block lengths, P positions after the prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mbd_core.studies.block_batch.cache_geometry import Array


@dataclass(frozen=True, kw_only=True)
class GradedRun:
    """One sample decoded with one block length: its score (1 correct, 0 wrong, or a share) and its forwards."""

    accuracy: float
    num_forwards: int


@dataclass(frozen=True, kw_only=True)
class MeanRun:
    """Mean accuracy and mean number of forwards over the samples."""

    accuracy: float
    num_forwards: float


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """The best block length of every sample, compared with every fixed one.

    fixed   the mean of each block length
    oracle  the mean over the samples, each with its most accurate block length (the cheapest of several)
    mixed   the mean of each sample's best accuracy and of its fewest forwards, which may come from different block
            lengths: what the released script reports
    chosen  for how many samples the oracle takes each block length
    """

    fixed: Mapping[int, MeanRun]
    oracle: MeanRun
    mixed: MeanRun
    chosen: Mapping[int, int]


def per_sample_oracle(samples: Sequence[Mapping[int, GradedRun]]) -> Oracle:
    """The oracle over block lengths (Fig. 2); `ValueError` unless all samples have the same block lengths."""
    lengths = _same_lengths(samples)
    best = [min(lengths, key=lambda n: (-s[n].accuracy, s[n].num_forwards, n)) for s in samples]
    return Oracle(
        fixed={n: _mean([s[n] for s in samples]) for n in lengths},
        oracle=_mean([s[n] for s, n in zip(samples, best, strict=True)]),
        mixed=_mean(
            [
                GradedRun(
                    accuracy=max(run.accuracy for run in s.values()),
                    num_forwards=min(run.num_forwards for run in s.values()),
                )
                for s in samples
            ]
        ),
        chosen={n: best.count(n) for n in lengths},
    )


def _mean(runs: Sequence[GradedRun]) -> MeanRun:
    return MeanRun(
        accuracy=float(np.mean([r.accuracy for r in runs])),
        num_forwards=float(np.mean([r.num_forwards for r in runs])),
    )


def _same_lengths(samples: Sequence[Mapping[int, object]]) -> list[int]:
    if not samples or not samples[0]:
        raise ValueError("no samples, or none with a block length: nothing to compare")
    lengths = sorted(samples[0])
    for number, sample in enumerate(samples):
        if sorted(sample) != lengths:
            raise ValueError(f"sample {number} has block lengths {sorted(sample)}, the first one {lengths}")
    return lengths


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens before two outputs first differ; the shorter length if one continues the other."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


def bifurcation_lengths(outputs: Mapping[int, Sequence[int]]) -> dict[tuple[int, int], int]:
    """The common prefix of every pair of block lengths of one sample."""
    return {(a, b): common_prefix(outputs[a], outputs[b]) for a, b in combinations(sorted(outputs), 2)}


def mean_bifurcation_lengths(samples: Sequence[Mapping[int, Sequence[int]]]) -> dict[tuple[int, int], float]:
    """Table 5: the mean of each pair over the samples; `ValueError` unless all have the same block lengths."""
    _same_lengths(samples)
    rows = [bifurcation_lengths(s) for s in samples]
    return {pair: float(np.mean([row[pair] for row in rows])) for pair in rows[0]}


def bifurcation_matrix(samples: Sequence[Mapping[int, Sequence[int]]]) -> Array:
    """`mean_bifurcation_lengths` as a symmetric matrix (S, S), lengths ascending; the diagonal holds mean lengths."""
    lengths = _same_lengths(samples)
    matrix = np.diag([float(np.mean([len(s[n]) for s in samples])) for n in lengths])
    for (a, b), value in mean_bifurcation_lengths(samples).items():
        i, j = lengths.index(a), lengths.index(b)
        matrix[i, j] = matrix[j, i] = value
    return matrix


def consensus(outputs: Mapping[int, Sequence[int]]) -> Array:
    """The share of block lengths, itself included, with the same token at a position -> (S, P), lengths ascending.

    NaN after the end of an output. Before the first bifurcation all shares are 1 (Fig. 4).
    """
    lengths = sorted(outputs)
    shares = np.full((len(lengths), max(len(outputs[n]) for n in lengths)), np.nan)
    for row, n in enumerate(lengths):
        for place, token in enumerate(outputs[n]):
            same = sum(place < len(outputs[m]) and outputs[m][place] == token for m in lengths)
            shares[row, place] = same / len(lengths)
    return shares


def mean_consensus(samples: Sequence[Mapping[int, Sequence[int]]]) -> Array:
    """The mean of `consensus` over the samples whose output reaches a position -> (S, P); NaN where none does."""
    lengths = _same_lengths(samples)
    shares = [consensus(s) for s in samples]
    width = max(one.shape[1] for one in shares)
    total, count = np.zeros((len(lengths), width)), np.zeros((len(lengths), width))
    for one in shares:
        total[:, : one.shape[1]] += np.nan_to_num(one)
        count[:, : one.shape[1]] += ~np.isnan(one)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
