"""The effect of the block length on the output; the results of each prompt; the checks of the bounds.

The outputs of one sample are {block length: generated token ids}; a bifurcation is a position of the canvas, in
tokens. Sources: the BlockBatch paper, Figures 2 and 4 and Table 5.

Shape legend: S block lengths, P positions after the prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mbd_core.decoding.blocks.request import FinishReason
from mbd_core.decoding.canvas.branches import BranchStats
from research.block_batch.bounds import Array, BoundedValue, Drift, error_bounds, measured_drift
from research.block_batch.caches import CacheRecord, CacheRun


@dataclass(frozen=True, kw_only=True)
class MeanRun:
    """Accuracy (1 correct, 0 wrong, or a share) and number of forwards of a sample, or their means over samples."""

    accuracy: float
    num_forwards: float


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """The best block length of every sample, compared with every fixed block length.

    fixed   the mean of each block length
    oracle  the mean over the samples, each with its most accurate block length (the cheapest of equally accurate ones)
    mixed   the mean of each sample's best accuracy and of its fewest forwards, possibly of different block
            lengths, as in the released script
    chosen  the number of samples for which the oracle takes each block length
    """

    fixed: Mapping[int, MeanRun]
    oracle: MeanRun
    mixed: MeanRun
    chosen: Mapping[int, int]


def per_sample_oracle(samples: Sequence[Mapping[int, MeanRun]]) -> Oracle:
    """The oracle over block lengths (Fig. 2); `ValueError` unless all samples have the same block lengths."""
    lengths = _same_lengths(samples)
    best = [min(lengths, key=lambda n: (-s[n].accuracy, s[n].num_forwards, n)) for s in samples]
    return Oracle(
        fixed={n: _mean([s[n] for s in samples]) for n in lengths},
        oracle=_mean([s[n] for s, n in zip(samples, best, strict=True)]),
        mixed=_mean(
            [
                MeanRun(
                    accuracy=max(run.accuracy for run in s.values()),
                    num_forwards=min(run.num_forwards for run in s.values()),
                )
                for s in samples
            ]
        ),
        chosen={n: best.count(n) for n in lengths},
    )


def _mean(runs: Sequence[MeanRun]) -> MeanRun:
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


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens before two outputs first differ; the shorter length if one continues the other."""
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


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
            count = sum(place < len(outputs[m]) and outputs[m][place] == token for m in lengths)
            shares[row, place] = count / len(lengths)
    return shares


def mean_consensus(samples: Sequence[Mapping[int, Sequence[int]]]) -> Array:
    """The mean of `consensus` over the samples whose output reaches a position -> (S, P); NaN where none does."""
    lengths = _same_lengths(samples)
    shares = [consensus(s) for s in samples]
    width = max(share.shape[1] for share in shares)
    total, count = np.zeros((len(lengths), width)), np.zeros((len(lengths), width))
    for share in shares:
        total[:, : share.shape[1]] += np.nan_to_num(share)
        count[:, : share.shape[1]] += ~np.isnan(share)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


@dataclass(frozen=True, kw_only=True)
class DecodedPrompt:
    """One prompt decoded by one method. `accuracy` is `None` for a prompt without a grader."""

    tokens: list[int]
    num_forwards: int
    finish_reason: FinishReason
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class StudiedPrompt:
    """One prompt: decoded with each block length by itself, and with all block lengths by BlockBatch."""

    name: str
    prompt_length: int
    single: Mapping[int, DecodedPrompt]
    block_batch: DecodedPrompt
    winner: int
    branches: list[BranchStats]
    caches: CacheRecord | None = None

    @property
    def outputs(self) -> dict[int, list[int]]:
        """The output of each block length by itself."""
        return {n: run.tokens for n, run in self.single.items()}


@dataclass(frozen=True, kw_only=True)
class BranchStudy:
    """The data of the report.

    graded    whether all prompts have accuracies
    rounding  relative rounding error of the caches' dtype
    """

    block_lengths: list[int]
    prompts: list[StudiedPrompt]
    graded: bool
    rounding: float


def oracle_of(prompts: Sequence[StudiedPrompt]) -> Oracle:
    """The per-sample oracle over the single runs. Ungraded runs count as equally accurate, so the cheapest wins."""
    return per_sample_oracle(
        [
            {
                n: MeanRun(accuracy=run.accuracy or 0.0, num_forwards=run.num_forwards)
                for n, run in prompt.single.items()
            }
            for prompt in prompts
        ]
    )


FLOAT_ROUNDING = 8.0  # the allowed error of a refresh, in relative errors of the dtype
TINY = 1e-9  # the least value at which a bound counts


@dataclass(frozen=True, kw_only=True)
class BoundCheck:
    """A statement of a proposition, true in `held` of `count` checks; `value` and `bound` of the tightest check."""

    proposition: str
    statement: str
    relation: str
    block_length: int | None
    count: int
    held: int
    value: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.held == self.count


def checks_of(prompts: Sequence[StudiedPrompt], *, rounding: float) -> list[BoundCheck]:
    """Every bound of Props. 1 to 3 on the watched caches; `rounding` is the relative error of their dtype."""
    records = [p.caches for p in prompts if p.caches is not None]
    checks: list[BoundCheck | None] = []
    for n in sorted(records[0].singles) if records else []:
        watches = [r.singles[n] for r in records]
        checks += _first_proposition(n, watches)
        checks += _second_proposition(n, watches, rounding)
    distances = [b for r in records for b in r.distances]
    checks.append(_check("3", "projected distance d_proj of two branches, at most their distance d", None, distances))
    return [c for c in checks if c is not None]


def _first_proposition(n: int, watches: Sequence[CacheRun]) -> list[BoundCheck | None]:
    energies = [BoundedValue(mean, share) for w in watches for mean, share in w.energies]
    movements = [m for w in watches for m in w.movements]
    exceptions = [b for m in movements if (b := m.against_refresh) is not None]
    return [
        _check("Lemma 1", "E |P_B Δ_full|² = m/L |Δ_full|²", n, energies, relation="=", test=_equal),
        _check("1", "E |P_B Δ_full| ≤ √(m/L) |Δ_full|", n, [p for w in watches for p in w.projections]),
        _check("1", "E |Δ_blk| ≤ √(m/L) |Δ_full| + E |r|", n, [m.bound for m in movements]),
        _check(
            "1",
            f"E |Δ_blk| < |Δ_full| where E |r| < (1 − √(m/L)) |Δ_full| (so in {len(exceptions)} of {len(movements)})",
            n,
            exceptions,
            relation="<",
        ),
    ]


def _second_proposition(n: int, watches: Sequence[CacheRun], rounding: float) -> list[BoundCheck | None]:
    exact = [
        BoundedValue(e.error, FLOAT_ROUNDING * rounding * e.norm)
        for w in watches
        for e in w.events
        if e.kind == "refresh" and e.error is not None and e.norm is not None
    ]
    drifts = [measured_drift(w.errors, w.kinds) for w in watches]
    own_bounds = [b for w, drift in zip(watches, drifts, strict=True) for b in error_bounds(w.errors, w.kinds, drift)]
    foreign = []
    for number, w in enumerate(watches):
        other_drifts = drifts[:number] + drifts[number + 1 :]
        if other_drifts:
            foreign += error_bounds(w.errors, w.kinds, _widest_drift(other_drifts))
    return [
        _check("2", "a full refresh is exact (β = 0, ε_F = 0): E after it, at most rounding", n, exact),
        _check("2", "E ≤ a^r Y + ε_B Σ a^i, constants of the same run (true if the code is)", n, own_bounds),
        _check("2", "the same, constants of the other prompts' runs (a prediction)", n, foreign),
    ]


def _widest_drift(drifts: Sequence[Drift]) -> Drift:
    return Drift(
        growth=max(d.growth for d in drifts),
        block_noise=max(d.block_noise for d in drifts),
        contraction=max(d.contraction for d in drifts),
        refresh_noise=max(d.refresh_noise for d in drifts),
    )


def _equal(bound: BoundedValue) -> bool:
    return bool(np.isclose(bound.value, bound.bound, rtol=1e-6))


def _check(
    proposition: str,
    statement: str,
    block_length: int | None,
    bounds: Sequence[BoundedValue],
    *,
    relation: str = "≤",
    test: Callable[[BoundedValue], bool] = lambda bound: bound.holds,
) -> BoundCheck | None:
    if not bounds:
        return None
    tightest = max(bounds, key=lambda b: (not test(b), b.value / max(b.bound, TINY)))
    return BoundCheck(
        proposition=proposition,
        statement=statement,
        relation=relation,
        block_length=block_length,
        count=len(bounds),
        held=sum(map(test, bounds)),
        value=tightest.value,
        bound=tightest.bound,
    )
