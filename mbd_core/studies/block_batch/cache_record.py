"""The caches of one prompt in one frame: trajectories, moves, and the distances of branches (Fig. 3, Prop. 3).

Shape legend: N events, V numbers of a sketch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mbd_core.studies.block_batch.cache_bounds import Bound, distance_bounds
from mbd_core.studies.block_batch.cache_events import BranchedRun, BranchSync, CacheEvent, CacheRun
from mbd_core.studies.block_batch.cache_geometry import coordinates


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
