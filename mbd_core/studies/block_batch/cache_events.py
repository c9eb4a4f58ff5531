"""The record of a watched run's caches: one event for each forward, and the measurements.

Shape legend: C numbers of a sketch.
"""

from dataclasses import dataclass, field
from typing import Literal

from mbd_core.studies.block_batch.cache_bounds import BlockMovement, Bound, ForwardKind
from mbd_core.studies.block_batch.cache_geometry import Array, SyncContraction

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
