"""KV caches as points (Eqs. 3 and 4): trajectories, dispersion of branches, and the bounds of Propositions 1 to 3.

Each check returns a measured value and the paper's upper bound of it.

Shape legend: N events or branches, L positions, D numbers of one position, V = L * D numbers of one cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# KV caches as points: BlockBatch's trajectory coordinates (Eqs. 3 and 4) and the dispersion of branches (App. C.4).
#
# A cache is one vector: all keys and values of a lane, flattened position by position.
#
# Shape legend: N events or branches, V numbers of one cache.

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Coordinates:
    """Caches in the frame of Eq. 3: z along the anchor, (a, q) in the tangent plane, and the length of the rest.

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
    centred = residual - residual.mean(axis=0)
    _, strength, right = np.linalg.svd(centred, full_matrices=False)
    tangents = np.zeros((2, len(anchor)))
    for i in range(min(2, len(strength))):
        if strength[i] > 1e-9 * max(float(np.linalg.norm(caches_NV)), 1.0):
            tangents[i] = right[i]
    a, q = residual @ tangents[0], residual @ tangents[1]
    rest = np.linalg.norm(residual - a[:, None] * tangents[0] - q[:, None] * tangents[1], axis=1)
    return Coordinates(anchor, np.stack((u0, *tangents)), z, a, q, rest)


def dispersion(caches_NV: Array) -> float:
    """D_t: the mean squared distance over ordered pairs of branches at one event (App. C.4); 0 for a single one."""
    count = len(caches_NV)
    if count < 2:
        return 0.0
    spread = caches_NV - caches_NV.mean(axis=0)
    return float(2 * count * (spread**2).sum() / (count * (count - 1)))


def pair_dispersion(squared_BB: Array) -> float:
    """`dispersion` of B branches, from their squared distances."""
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
    """The dispersion before and after `copies` (source, target), in order, of branches at these squared distances.

    A target gets the distances of its source, so no cache is needed.
    """
    now_BB = squared_BB.copy()
    for source, target in copies:
        now_BB[target] = now_BB[source]
        now_BB[:, target] = now_BB[:, source]
        now_BB[target, target] = 0.0
    return SyncContraction(pair_dispersion(squared_BB), pair_dispersion(now_BB))


# The bounds of BlockBatch's Propositions 1 to 3 (App. C) on measured caches.

ForwardKind = Literal["block", "refresh"]


@dataclass(frozen=True)
class Bound:
    """A measured value and its upper bound; `holds` allows float rounding."""

    value: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.value <= self.bound * (1 + 1e-6) + 1e-9


def distance_bounds(
    caches_NV: Array, where: Coordinates, pairs: Sequence[tuple[int, int]] | None = None
) -> dict[tuple[int, int], Bound]:
    """Prop. 3: the projected distance (Eq. 6) and the full distance of every pair of caches, or of `pairs`."""
    points = where.points
    if pairs is None:
        pairs = [(i, j) for i in range(len(points)) for j in range(i)]
    return {
        (i, j): Bound(float(np.linalg.norm(points[i] - points[j])), float(np.linalg.norm(caches_NV[i] - caches_NV[j])))
        for i, j in pairs
    }


@dataclass(frozen=True)
class BlockUpdate:
    """A block forward's correction of a cache (L, D), and its block's positions [start, stop)."""

    start: int
    stop: int
    correction_LD: Array


def projected_energy(full_LD: Array, block_size: int) -> tuple[float, float]:
    """Lemma 1: the mean energy of a full refresh's correction inside a block, and m / L of its whole energy.

    The two must be equal.
    The mean is taken over the blocks that tile the canvas, so each position is in one of them with probability m / L;
    `ValueError` if they do not tile it.
    """
    blocks = _tiles(full_LD, block_size)
    mean = float(np.mean([(full_LD[start:stop] ** 2).sum() for start, stop in blocks]))
    return mean, block_size / len(full_LD) * float((full_LD**2).sum())


def projected_norm_bound(full_LD: Array, block_size: int) -> Bound:
    """Prop. 1, first part: E |P_B d_full| <= sqrt(m / L) |d_full|."""
    norms = [np.linalg.norm(full_LD[start:stop]) for start, stop in _tiles(full_LD, block_size)]
    share = np.sqrt(block_size / len(full_LD))
    return Bound(float(np.mean(norms)), float(share * np.linalg.norm(full_LD)))


def block_movement_bound(full_LD: Array, updates: Sequence[BlockUpdate]) -> Bound:
    """Prop. 1 with its residual: E |d_blk| <= sqrt(m / L) |d_full| + E |d_blk - P_B d_full|.

    `updates` are what a block forward from the same cache and tokens would do, one for each of the blocks that tile
    the canvas; else `ValueError`.
    """
    size = updates[0].stop - updates[0].start if updates else 0
    if [(u.start, u.stop) for u in updates] != _tiles(full_LD, size):
        raise ValueError(f"{len(updates)} updates do not tile {len(full_LD)} positions with blocks of {size}")
    moved, residual = [], []
    for update in updates:
        inside = np.zeros_like(full_LD)
        inside[update.start : update.stop] = full_LD[update.start : update.stop]
        moved.append(float(np.linalg.norm(update.correction_LD)))
        residual.append(float(np.linalg.norm(update.correction_LD - inside)))
    return BlockMovement(
        share=size / len(full_LD),
        full=float(np.linalg.norm(full_LD)),
        moved=float(np.mean(moved)),
        residual=float(np.mean(residual)),
    ).bound


@dataclass(frozen=True, kw_only=True)
class BlockMovement:
    """Prop. 1's lengths, without the corrections that they were measured on.

    share     m / L
    full      |d_full|
    moved     mean |d_blk| over the blocks that tile the canvas
    residual  mean |d_blk - P_B d_full| over them
    """

    share: float
    full: float
    moved: float
    residual: float

    @property
    def bound(self) -> Bound:
        """E |d_blk| <= sqrt(m / L) |d_full| + E |r|."""
        return Bound(self.moved, float(np.sqrt(self.share)) * self.full + self.residual)

    @property
    def against_refresh(self) -> Bound | None:
        """E |d_blk| < |d_full| if its premise E |r| < (1 - sqrt(m / L)) |d_full| is met, else `None`."""
        premise = self.residual < (1 - float(np.sqrt(self.share))) * self.full
        return Bound(self.moved, self.full) if premise else None


def _tiles(full_LD: Array, block_size: int) -> list[tuple[int, int]]:
    length = len(full_LD)
    if block_size < 1 or length % block_size:
        raise ValueError(f"blocks of {block_size} do not tile {length} positions: the chance m / L needs whole ones")
    return [(s, s + block_size) for s in range(0, length, block_size)]


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Prop. 2's premises on the error E (distance of a cache from the full forward's on the same tokens).

    A block forward: E' <= (1 + growth) E + block_noise. A full refresh: E' <= contraction E + refresh_noise.
    """

    growth: float
    block_noise: float
    contraction: float
    refresh_noise: float

    def __post_init__(self) -> None:
        if min(self.growth, self.block_noise, self.refresh_noise) < 0 or not 0 <= self.contraction < 1:
            raise ValueError(f"{self} must have no negative number, and contraction below 1")

    def rate(self, interval: int) -> float:
        """rho = beta (1 + lambda)^R; errors stay bounded where it is below 1."""
        return self.contraction * (1 + self.growth) ** interval

    def after_blocks(self, error: float, count: int) -> float:
        """Bound on the error `count` block forwards after a refresh that left `error`."""
        a = 1 + self.growth
        return a**count * error + self.block_noise * sum(a**i for i in range(count))

    def after_refreshes(self, error: float, interval: int, count: int) -> float:
        """Bound on the error right after `count` refreshes, each after `interval` block forwards."""
        rate, constant = self.rate(interval), self._constant(interval)
        return rate**count * error + constant * sum(rate**j for j in range(count))

    def limit(self, interval: int) -> float:
        """lim sup of the error after refreshes, c / (1 - rho); infinite unless rho < 1."""
        rate = self.rate(interval)
        return self._constant(interval) / (1 - rate) if rate < 1 else float("inf")

    def _constant(self, interval: int) -> float:
        return self.contraction * self.after_blocks(0.0, interval) + self.refresh_noise


def measured_drift(errors: Sequence[float], kinds: Sequence[ForwardKind], *, growth: float = 0.0) -> Drift:
    """The smallest noise with which a run's events satisfy the premises, for a given `growth` and contraction 0.

    `errors` has one number before the first event and one after each of `kinds`.
    """
    _check_events(errors, kinds)
    block = [errors[i + 1] - (1 + growth) * errors[i] for i, kind in enumerate(kinds) if kind == "block"]
    refresh = [errors[i + 1] for i, kind in enumerate(kinds) if kind == "refresh"]
    return Drift(
        growth=growth,
        block_noise=max([0.0, *block]),
        contraction=0.0,
        refresh_noise=max(refresh, default=0.0),
    )


def error_bounds(errors: Sequence[float], kinds: Sequence[ForwardKind], drift: Drift) -> list[Bound]:
    """Prop. 2 along a run: each event's error and its bound by the recurrence from the first error."""
    _check_events(errors, kinds)
    bound, out = errors[0], []
    for i, kind in enumerate(kinds):
        refreshed = drift.contraction * bound + drift.refresh_noise
        bound = refreshed if kind == "refresh" else drift.after_blocks(bound, 1)
        out.append(Bound(errors[i + 1], bound))
    return out


def _check_events(errors: Sequence[float], kinds: Sequence[ForwardKind]) -> None:
    if len(errors) != len(kinds) + 1:
        raise ValueError(
            f"{len(errors)} errors for {len(kinds)} events; give the first error and one after each event"
        )


# The record of a watched run's caches: one event for each forward, and the measurements.
#
# Shape legend: C numbers of a sketch.

CacheEventKind = Literal["initial", "refresh", "block", "sync"]


@dataclass(frozen=True, kw_only=True)
class CacheEvent:
    """A branch's cache after one forward, or after a synchronisation that overwrote it.

    branch  block length
    step    number of forwards before this one
    sketch  (C,) float64
    error   distance from the cache of a full forward on the same tokens, `None` if not measured
    norm    length of the cache as a vector, `None` if the error was not measured
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
    projections: list[Bound] = field(default_factory=list)
    movements: list[BlockMovement] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """E (Prop. 2) after each forward."""
        return [e.error for e in self.events if e.error is not None]

    @property
    def kinds(self) -> list[ForwardKind]:
        """The forwards after the first."""
        return ["block" if e.kind == "block" else "refresh" for e in self.events[1:]]


@dataclass(frozen=True, kw_only=True)
class BranchSync:
    """A synchronisation: the forwards before it, the leader's block length and those of the overwritten branches, and
    D_t before and after it."""

    step: int
    leader: int
    overwritten: tuple[int, ...]
    contraction: SyncContraction


@dataclass(frozen=True)
class BranchedRun:
    """The measurements of a BlockBatch run: events of every branch, dispersions, synchronisations.

    dispersions  (step, D_t) after every forward with at least two branches that have masks, on the caches themselves
    ratios       sketched distance / distance of every pair of these branches whose caches differ
    """

    events: list[CacheEvent] = field(default_factory=list)
    syncs: list[BranchSync] = field(default_factory=list)
    dispersions: list[tuple[int, float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


# The caches of one prompt in one frame: trajectories, moves, and the distances of branches (Fig. 3, Prop. 3).
#
# Shape legend: N events, V numbers of a sketch.


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
    distances: list[Bound]
    singles: Mapping[int, CacheRun]


def record_caches(singles: Mapping[int, CacheRun], branched: BranchedRun) -> CacheRecord:
    """Put all caches of a prompt into one frame (Eq. 3, anchored at the first forward's) and compare them."""
    runs = {"single": [e for n in singles for e in singles[n].events], "block_batch": branched.events}
    named = [(run, event) for run, events in runs.items() for event in events]
    sketches_NV = np.stack([event.sketch for _, event in named])
    where = coordinates(sketches_NV, [event.kind == "initial" for _, event in named])
    together: dict[tuple[str, int], dict[int, int]] = {}
    for number, (run, event) in enumerate(named):
        together.setdefault((run, event.step), {})[event.branch] = number  # a forward replaces a sync of its step
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


def _moves(runs: Mapping[str, Sequence[CacheEvent]]) -> dict[tuple[str, str], float]:
    lengths: dict[tuple[str, str], list[float]] = {}
    for run, events in runs.items():
        last: dict[int, CacheEvent] = {}
        for event in events:
            previous = last.get(event.branch)
            if previous is not None:
                moved = float(np.linalg.norm(event.sketch - previous.sketch))
                lengths.setdefault((run, event.kind), []).append(moved)
            last[event.branch] = event
    return {key: float(np.mean(values)) for key, values in sorted(lengths.items())}
