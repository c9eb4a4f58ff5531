"""What BlockBatch's analyses say of a set of prompts: forwards, oracle, bifurcations, trajectories, checked bounds.

Shape legend: N events, V numbers of a sketch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from mbd_core.canvas.branch import BranchStats
from mbd_core.decoding.request import FinishReason
from mbd_core.studies.block_length_tokens import Oracle, SampleRun, per_sample_oracle
from mbd_core.studies.cache_record import BranchedRun, CacheRun, Event, Sync
from mbd_core.studies.kv_trajectory import (
    Bound,
    Drift,
    coordinates,
    distance_bounds,
    error_bounds,
    measured_drift,
)

FLOAT_ROUNDING = 8.0  # times the relative error of a dtype
TINY = 1e-9  # below it a bound is zero


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One prompt under one method. `accuracy` is `None` where nothing says what is right."""

    tokens: list[int]
    num_forwards: int
    finish_reason: FinishReason
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrajectoryPoint:
    """A cache in the frame of its prompt (Eq. 3): z along the anchor, x and y in the tangent plane."""

    run: str
    branch: int
    step: int
    kind: str
    x: float
    y: float
    z: float


@dataclass(frozen=True, kw_only=True)
class CacheRecord:
    """The caches of one prompt.

    points       of the single runs ("single") and of BlockBatch's branches ("block_batch"), in one frame
    dispersions  (step, D_t) of BlockBatch's branches behind a forward, on the caches themselves
    moves        mean distance that an event of a kind moved a cache, by (run, kind)
    ratios       sketched distance / distance, of pairs of BlockBatch's caches
    distances    Prop. 3, of branches of the same step
    """

    points: list[TrajectoryPoint]
    dispersions: list[tuple[int, float]]
    syncs: list[Sync]
    moves: dict[tuple[str, str], float]
    ratios: list[float]
    distances: list[Bound]
    singles: Mapping[int, CacheRun]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt: decoded with every block length alone, and with all of them by BlockBatch."""

    name: str
    prompt_length: int
    single: Mapping[int, Decoded]
    block_batch: Decoded
    winner: int
    branches: list[BranchStats]
    caches: CacheRecord | None = None

    @property
    def outputs(self) -> dict[int, list[int]]:
        """What each block length alone generated."""
        return {n: run.tokens for n, run in self.single.items()}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statement of a proposition, checked `count` times; `value` and `bound` are those of the tightest check."""

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


def record_caches(singles: Mapping[int, CacheRun], branched: BranchedRun) -> CacheRecord:
    """Put all caches of a prompt into one frame (Eq. 3, anchored at the first forward's) and compare them."""
    runs = {"single": [e for n in singles for e in singles[n].events], "block_batch": branched.events}
    named = [(run, event) for run, events in runs.items() for event in events]
    sketches_NV = np.stack([event.sketch for _, event in named])
    where = coordinates(sketches_NV, [event.kind == "initial" for _, event in named])
    together: dict[tuple[str, int], dict[int, int]] = {}
    for number, (run, event) in enumerate(named):
        together.setdefault((run, event.step), {})[event.branch] = number  # of a sync and a forward, the forward
    pairs = [pair for numbers in together.values() for pair in combinations(numbers.values(), 2)]
    points = [
        TrajectoryPoint(run=run, branch=e.branch, step=e.step, kind=e.kind, x=float(x), y=float(y), z=float(z))
        for (run, e), z, x, y in zip(named, where.z_N, where.a_N, where.q_N, strict=True)
    ]
    return CacheRecord(
        points=points,
        dispersions=branched.dispersions,
        syncs=branched.syncs,
        moves=_moves(runs),
        ratios=branched.ratios,
        distances=list(distance_bounds(sketches_NV, where, pairs).values()),
        singles=singles,
    )


def _moves(runs: Mapping[str, Sequence[Event]]) -> dict[tuple[str, str], float]:
    lengths: dict[tuple[str, str], list[float]] = {}
    for run, events in runs.items():
        last: dict[int, Event] = {}
        for event in events:
            before = last.get(event.branch)
            if before is not None:
                moved = float(np.linalg.norm(event.sketch - before.sketch))
                lengths.setdefault((run, event.kind), []).append(moved)
            last[event.branch] = event
    return {key: float(np.mean(values)) for key, values in sorted(lengths.items())}


def oracle_of(samples: Sequence[Sample]) -> Oracle:
    """The per-sample oracle over the single runs; ungraded ones count as equally accurate: the cheapest."""
    return per_sample_oracle(
        [
            {
                n: SampleRun(accuracy=run.accuracy or 0.0, num_forwards=run.num_forwards)
                for n, run in sample.single.items()
            }
            for sample in samples
        ]
    )


def checks_of(samples: Sequence[Sample], *, rounding: float) -> list[Check]:
    """Every bound of Props. 1 to 3 on the caches that were watched; `rounding` is their dtype's relative error."""
    records = [s.caches for s in samples if s.caches is not None]
    found: list[Check | None] = []
    for n in sorted(records[0].singles) if records else []:
        watches = [r.singles[n] for r in records]
        found += _first_proposition(n, watches)
        found += _second_proposition(n, watches, rounding)
    distances = [b for r in records for b in r.distances]
    found.append(_check("3", "projected distance d_proj of two branches, at most their distance d", None, distances))
    return [c for c in found if c is not None]


def _first_proposition(n: int, watches: Sequence[CacheRun]) -> list[Check | None]:
    energies = [Bound(mean, share) for w in watches for mean, share in w.energies]
    movements = [m for w in watches for m in w.movements]
    against = [b for m in movements if (b := m.against_refresh) is not None]
    return [
        _check("Lemma 1", "E |P_B Δ_full|² = m/L |Δ_full|²", n, energies, relation="=", test=_equal),
        _check("1", "E |P_B Δ_full| ≤ √(m/L) |Δ_full|", n, [p for w in watches for p in w.projections]),
        _check("1", "E |Δ_blk| ≤ √(m/L) |Δ_full| + E |r|", n, [m.bound for m in movements]),
        _check(
            "1",
            f"E |Δ_blk| < |Δ_full| where E |r| < (1 − √(m/L)) |Δ_full| (so in {len(against)} of {len(movements)})",
            n,
            against,
            relation="<",
        ),
    ]


def _second_proposition(n: int, watches: Sequence[CacheRun], rounding: float) -> list[Check | None]:
    exact = [
        Bound(e.error, FLOAT_ROUNDING * rounding * e.norm)
        for w in watches
        for e in w.events
        if e.kind == "refresh" and e.error is not None and e.norm is not None
    ]
    drifts = [measured_drift(w.errors, w.kinds) for w in watches]
    own = [b for w, drift in zip(watches, drifts, strict=True) for b in error_bounds(w.errors, w.kinds, drift)]
    foreign = []
    for number, w in enumerate(watches):
        others = drifts[:number] + drifts[number + 1 :]
        if others:
            foreign += error_bounds(w.errors, w.kinds, _widest(others))
    return [
        _check("2", "a full refresh is exact (β = 0, ε_F = 0): E behind it, at most rounding", n, exact),
        _check("2", "E ≤ a^r Y + ε_B Σ a^i, constants of the same run (true if the code is)", n, own),
        _check("2", "the same, constants of the other prompts' runs (a prediction)", n, foreign),
    ]


def _widest(drifts: Sequence[Drift]) -> Drift:
    return Drift(
        growth=max(d.growth for d in drifts),
        block_noise=max(d.block_noise for d in drifts),
        contraction=max(d.contraction for d in drifts),
        refresh_noise=max(d.refresh_noise for d in drifts),
    )


def _equal(bound: Bound) -> bool:
    return bool(np.isclose(bound.value, bound.bound, rtol=1e-6))


def _check(
    proposition: str,
    statement: str,
    block_length: int | None,
    bounds: Sequence[Bound],
    *,
    relation: str = "≤",
    test: Callable[[Bound], bool] = lambda bound: bound.holds,
) -> Check | None:
    if not bounds:
        return None
    tightest = max(bounds, key=lambda b: (not test(b), b.value / max(b.bound, TINY)))
    return Check(
        proposition=proposition,
        statement=statement,
        relation=relation,
        block_length=block_length,
        count=len(bounds),
        held=sum(map(test, bounds)),
        value=tightest.value,
        bound=tightest.bound,
    )


@dataclass(frozen=True, kw_only=True)
class BranchStudy:
    """All that a report is made of.

    graded    whether accuracies are known
    rounding  relative rounding error of the caches' dtype
    """

    block_lengths: list[int]
    samples: list[Sample]
    graded: bool
    rounding: float
    settings: dict[str, object] = field(default_factory=dict)
