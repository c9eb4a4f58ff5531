"""KV caches as points: trajectory coordinates (Eqs. 3 and 4), the dispersion of branches (App. C.4) and their records.

A cache is one vector: all keys and values of a lane, flattened position by position.

Shape legend: N events or branches, B branches, V numbers of one cache or of its sketch, C numbers of a sketch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

import numpy as np

from research.block_batch.bounds import Array, BlockMovement, BoundedValue, ForwardKind


@dataclass(frozen=True)
class Coordinates:
    """Caches in the frame of Eq. 3: z along the anchor, (a, q) in the tangent plane, and the length of the remainder.

    frame  (3, V): u0, e1, e2, orthonormal; e1 or e2 is zero if the residuals do not span it
    """

    anchor: Array
    frame: Array
    z_N: Array
    a_N: Array
    q_N: Array
    rest_N: Array

    @property
    def points(self) -> Array:
        """(N, 3)."""
        return np.stack((self.z_N, self.a_N, self.q_N), axis=1)


def coordinates(caches_NV: Array, initial_N: Sequence[bool]) -> Coordinates:
    """Eqs. 3 and 4: the anchor c0 is the mean of the initial caches, u0 its direction, e1 and e2 the leading right
    singular vectors of the centred residuals. `ValueError` without an initial cache, or if the anchor is zero."""
    if len(initial_N) != len(caches_NV) or not any(initial_N):
        raise ValueError(f"{sum(initial_N)} of {len(caches_NV)} caches are initial ({len(initial_N)} flags); give one")
    anchor = caches_NV[np.asarray(initial_N)].mean(axis=0)
    norm = np.linalg.norm(anchor)
    if norm == 0:
        raise ValueError("the anchor is the zero vector and has no direction; give caches that hold keys")
    u0 = anchor / norm
    delta = caches_NV - anchor
    z = delta @ u0
    residual = delta - z[:, None] * u0
    centred_residual = residual - residual.mean(axis=0)
    _, strength, right = np.linalg.svd(centred_residual, full_matrices=False)
    tangents = np.zeros((2, len(anchor)))
    for i in range(min(2, len(strength))):
        if strength[i] > 1e-9 * max(float(np.linalg.norm(caches_NV)), 1.0):
            tangents[i] = right[i]
    a, q = residual @ tangents[0], residual @ tangents[1]
    distance = np.linalg.norm(residual - a[:, None] * tangents[0] - q[:, None] * tangents[1], axis=1)
    return Coordinates(anchor, np.stack((u0, *tangents)), z, a, q, distance)


def dispersion(squared_BB: Array) -> float:
    """D_t of B branches at one event: the mean of their squared distances over ordered pairs; 0 for a single
    branch."""
    count = len(squared_BB)
    return float(squared_BB.sum() / (count * (count - 1))) if count > 1 else 0.0


@dataclass(frozen=True)
class SyncContraction:
    """The dispersion of the branches before (`pre`) and after (`post`) a synchronisation copied lanes."""

    pre: float
    post: float

    @property
    def gamma(self) -> float | None:
        """Gamma = D_post / D_pre; `None` if D_pre is 0."""
        return self.post / self.pre if self.pre > 0 else None


def sync_contraction(squared_BB: Array, copies: Sequence[tuple[int, int]]) -> SyncContraction:
    """The dispersion of branches at these squared distances, before and after `copies`: (source, target), in order.

    A target gets the distances of its source, so no cache is needed.
    """
    now_BB = squared_BB.copy()
    for source, target in copies:
        now_BB[target] = now_BB[source]
        now_BB[:, target] = now_BB[:, source]
        now_BB[target, target] = 0.0
    return SyncContraction(dispersion(squared_BB), dispersion(now_BB))


def distance_bounds(
    caches_NV: Array, frame: Coordinates, pairs: Sequence[tuple[int, int]] | None = None
) -> dict[tuple[int, int], BoundedValue]:
    """Prop. 3: the projected distance (Eq. 6) and the full distance of every pair of caches, or of `pairs`."""
    points = frame.points
    if pairs is None:
        pairs = [(i, j) for i in range(len(points)) for j in range(i)]
    return {
        (i, j): BoundedValue(
            float(np.linalg.norm(points[i] - points[j])), float(np.linalg.norm(caches_NV[i] - caches_NV[j]))
        )
        for i, j in pairs
    }


CacheEventKind = Literal["initial", "refresh", "block", "sync"]


@dataclass(frozen=True, kw_only=True)
class CacheEvent:
    """A branch's cache after one forward, or after a synchronisation that overwrote it.

    branch  block length
    step    number of forwards before this one
    sketch  (C,) float64
    error   distance from the cache of a full forward on the same tokens, `None` if not measured
    norm    the cache's norm as a vector, `None` if the error was not measured
    """

    branch: int
    step: int
    kind: CacheEventKind
    sketch: Array
    error: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class CacheRun:
    """The measurements of one trajectory: its events, and Prop. 1's quantities after some of its forwards."""

    events: list[CacheEvent] = field(default_factory=list)
    energies: list[tuple[float, float]] = field(default_factory=list)
    projections: list[BoundedValue] = field(default_factory=list)
    movements: list[BlockMovement] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """E (Prop. 2) after each forward."""
        return [e.error for e in self.events if e.error is not None]

    @property
    def kinds(self) -> list[ForwardKind]:
        """The kinds of the forwards after the first."""
        return ["block" if e.kind == "block" else "refresh" for e in self.events[1:]]


@dataclass(frozen=True, kw_only=True)
class BranchSync:
    """A synchronisation: the forwards before it, the block lengths of the leader and of the overwritten branches, and
    D_t before and after it."""

    step: int
    leader: int
    overwritten: tuple[int, ...]
    contraction: SyncContraction


@dataclass(frozen=True)
class BranchedRun:
    """The measurements of a BlockBatch run: events of every branch, dispersions, synchronisations.

    dispersions  (step, D_t) after every forward with at least two branches that have masks, on the caches themselves
    ratios       sketched distance / distance, for every pair of these branches whose caches differ
    """

    events: list[CacheEvent] = field(default_factory=list)
    syncs: list[BranchSync] = field(default_factory=list)
    dispersions: list[tuple[int, float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


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
    dispersions  (step, D_t) of BlockBatch's branches after a forward, on the caches themselves
    moves        mean distance by which an event moved a cache, by (run, kind of event)
    ratios       sketched distance / distance, for pairs of BlockBatch's caches
    distances    Prop. 3, for branches at the same step
    """

    points: list[TrajectoryPoint]
    dispersions: list[tuple[int, float]]
    syncs: list[BranchSync]
    moves: dict[tuple[str, str], float]
    ratios: list[float]
    distances: list[BoundedValue]
    singles: Mapping[int, CacheRun]


def record_caches(singles: Mapping[int, CacheRun], branched_run: BranchedRun) -> CacheRecord:
    """Put all caches of a prompt into one frame (Eq. 3, anchored at the first forward's) and compare them."""
    runs = {"single": [e for n in singles for e in singles[n].events], "block_batch": branched_run.events}
    run_events = [(run, event) for run, events in runs.items() for event in events]
    sketches_NV = np.stack([event.sketch for _, event in run_events])
    frame = coordinates(sketches_NV, [event.kind == "initial" for _, event in run_events])
    numbers_by_step: dict[tuple[str, int], dict[int, int]] = {}
    for number, (run, event) in enumerate(run_events):
        numbers_by_step.setdefault((run, event.step), {})[event.branch] = (
            number  # a forward replaces a sync of its step
        )
    pairs = [pair for numbers in numbers_by_step.values() for pair in combinations(numbers.values(), 2)]
    points = [
        TrajectoryPoint(run=run, branch=e.branch, step=e.step, kind=e.kind, x=float(x), y=float(y), z=float(z))
        for (run, e), z, x, y in zip(run_events, frame.z_N, frame.a_N, frame.q_N, strict=True)
    ]
    return CacheRecord(
        points=points,
        dispersions=branched_run.dispersions,
        syncs=branched_run.syncs,
        moves=_moves(runs),
        ratios=branched_run.ratios,
        distances=list(distance_bounds(sketches_NV, frame, pairs).values()),
        singles=singles,
    )


def _moves(runs: Mapping[str, Sequence[CacheEvent]]) -> dict[tuple[str, str], float]:
    lengths: dict[tuple[str, str], list[float]] = {}
    for run, events in runs.items():
        last_events: dict[int, CacheEvent] = {}
        for event in events:
            previous = last_events.get(event.branch)
            if previous is not None:
                length = float(np.linalg.norm(event.sketch - previous.sketch))
                lengths.setdefault((run, event.kind), []).append(length)
            last_events[event.branch] = event
    return {key: float(np.mean(values)) for key, values in sorted(lengths.items())}
