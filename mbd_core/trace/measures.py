"""The measures of a step trace: active blocks, mask ratios by slot, block lifetimes, token efficiency, the bubble."""

from dataclasses import dataclass

import numpy as np

from mbd_core.trace.traced_run import ACTIVE, DUMMY, TracedRun, block_lives

NUM_BINS = 10


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A summary of a distribution; `histogram` has the share of each value or bin."""

    n: int
    mean: float
    std: float
    p50: float
    p90: float
    max: float
    histogram: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RunMeasures:
    """The numbers of one run.

    num_other           requests without a Block Buffer, which the other numbers do not cover
    num_forwards        NFE summed over requests, store-only forwards included
    num_accepted        positions that became tokens, also after an EOS
    num_judged          drafted tokens that verifications judged
    num_confirmed       drafted tokens that they accepted
    num_verifications   judgements of a block's draft
    tpf                 num_accepted / num_forwards
    store_only_share    share of forwards that decoded nothing (the bubble)
    active_blocks       ACTIVE slots in a request's forward (Fig. 2 D-E); histogram from 0 to N_buf
    mask_ratios         mask ratios before a forward, by rank among its ACTIVE slots (Fig. 2 C); `NUM_BINS` bins
    mask_ratio_gaps     mask ratio of rank k + 1 minus that of rank k; `NUM_BINS` bins over [-1, 1]
    lifetimes           number of a block's forwards from its activation to its store; histogram from 1
    waiting             number of forwards in which a block was TO_CACHE, its store included; histogram from 0
    num_unfinished      blocks that were never stored: dropped after an EOS, or the trace ended earlier
    token_efficiency    eta = TPF_s / Q_s with Q_s = N_buf * B (paper Section 4.5), `None` without a block size
    resident_efficiency the same with only resident blocks in Q_s: the efficiency of dynamic packing
    """

    name: str
    num_requests: int
    num_other: int
    num_slots: int
    block_size: int | None
    num_forwards: int
    num_accepted: int
    num_edited: int
    num_judged: int
    num_confirmed: int
    num_verifications: int
    tpf: float
    num_store_only: int
    store_only_share: float
    active_blocks: Spread
    mask_ratios: tuple[Spread, ...]
    mask_ratio_gaps: tuple[Spread, ...]
    lifetimes: Spread | None
    waiting: Spread | None
    num_unfinished: int
    token_efficiency: float | None
    resident_efficiency: float | None


def measure(run: TracedRun) -> RunMeasures:
    """All numbers of a run."""
    active = np.concatenate([r.num_active_T for r in run.requests])
    resident = sum(int((r.state_TN != DUMMY).sum()) for r in run.requests)
    num_forwards, num_accepted = len(active), sum(int(r.accepted_TN.sum()) for r in run.requests)
    num_store_only = int((active == 0).sum())
    size = run.block_size
    lives = [life for r in run.requests for life in block_lives(r)]
    stored_lives = [life for life in lives if life.has_left]
    return RunMeasures(
        name=run.name,
        num_requests=len(run.requests),
        num_other=run.num_other,
        num_slots=run.num_slots,
        block_size=size,
        num_forwards=num_forwards,
        num_accepted=num_accepted,
        num_edited=sum(int(r.edited_TN.sum()) for r in run.requests),
        num_judged=sum(int(r.judged_TN.sum()) for r in run.requests),
        num_confirmed=sum(int(r.confirmed_TN.sum()) for r in run.requests),
        num_verifications=sum(int((r.judged_TN > 0).sum()) for r in run.requests),
        tpf=num_accepted / num_forwards,
        num_store_only=num_store_only,
        store_only_share=num_store_only / num_forwards,
        active_blocks=_spread(active, np.bincount(active, minlength=run.num_slots + 1)),
        mask_ratios=_spreads(ratios_by_rank(run)),
        mask_ratio_gaps=_spreads(ratio_gaps(run), low=-1.0),
        lifetimes=_counts([life.num_forwards for life in stored_lives], start=1),
        waiting=_counts([life.num_waiting for life in stored_lives], start=0),
        num_unfinished=len(lives) - len(stored_lives),
        token_efficiency=num_accepted / (num_forwards * run.num_slots * size) if size else None,
        resident_efficiency=num_accepted / (resident * size) if size else None,
    )


def active_by_forward(run: TracedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At each forward of a request: mean and standard deviation of the ACTIVE slots, number of requests (Fig. 2 D)."""
    longest = max(r.num_forwards for r in run.requests)
    table = np.full((len(run.requests), longest), np.nan)
    for row, r in zip(table, run.requests, strict=True):
        row[: r.num_forwards] = r.num_active_T
    return np.nanmean(table, axis=0), np.nanstd(table, axis=0), (~np.isnan(table)).sum(0)


def ratios_by_rank(run: TracedRun) -> list[np.ndarray]:
    """Mask ratios before the forwards, one array for each rank among the ACTIVE slots that occurs."""
    ratios: list[list[np.ndarray]] = [[] for _ in range(run.num_slots)]
    for r in run.requests:
        active = r.state_TN == ACTIVE
        rank = active.cumsum(1) - 1
        for number, of_rank in enumerate(ratios):
            of_rank.append(r.mask_ratio_TN[active & (rank == number)])
    return [values for of_rank in ratios if len(values := np.concatenate(of_rank))]


def ratio_gaps(run: TracedRun) -> list[np.ndarray]:
    """Differences of mask ratio between the ACTIVE slots of rank k + 1 and k of a forward, one array for each k."""
    gaps: list[list[float]] = [[] for _ in range(run.num_slots)]
    for r in run.requests:
        for active_N, ratio_N in zip(r.state_TN == ACTIVE, r.mask_ratio_TN, strict=True):
            for number, gap in enumerate(np.diff(ratio_N[active_N])):
                gaps[number].append(float(gap))
    return [np.array(of_rank) for of_rank in gaps if of_rank]


def _counts(values: list[int], *, start: int) -> Spread | None:
    """The spread of whole numbers, with a histogram bin for each value from `start`; `None` without values."""
    return _spread(np.array(values), np.bincount(values)[start:]) if values else None


def _spreads(groups: list[np.ndarray], *, low: float = 0.0) -> tuple[Spread, ...]:
    return tuple(_spread(g, np.histogram(g, bins=NUM_BINS, range=(low, 1.0))[0]) for g in groups)


def _spread(values: np.ndarray, counts: np.ndarray) -> Spread:
    return Spread(
        n=len(values),
        mean=float(values.mean()),
        std=float(values.std()),
        p50=float(np.percentile(values, 50)),
        p90=float(np.percentile(values, 90)),
        max=float(values.max()),
        histogram=tuple((counts / counts.sum()).tolist()),
    )
