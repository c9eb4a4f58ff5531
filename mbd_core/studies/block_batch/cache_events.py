"""What is kept of the caches of a watched run: an event a forward, and what was measured with it.

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
    step    forwards before this one
    sketch  (C,) float64
    error   distance from a full forward on the tokens that this forward saw, where it was measured
    norm    length of the whole cache, where the error was measured
    """

    branch: int
    step: int
    kind: CacheEventKind
    sketch: Array
    error: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class CacheRun:
    """What was measured on one trajectory: its events, and Prop. 1's quantities after a few of its forwards."""

    events: list[CacheEvent] = field(default_factory=list)
    energies: list[tuple[float, float]] = field(default_factory=list)
    projections: list[Bound] = field(default_factory=list)
    movements: list[BlockMovement] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """E after the first forward and after each later one."""
        return [e.error for e in self.events if e.error is not None]

    @property
    def kinds(self) -> list[ForwardKind]:
        """The forwards after the first."""
        return ["block" if e.kind == "block" else "refresh" for e in self.events[1:]]


@dataclass(frozen=True, kw_only=True)
class BranchSync:
    """A synchronisation: forwards before it, block lengths of the leader and the overwritten, what D_t did."""

    step: int
    leader: int
    overwritten: tuple[int, ...]
    contraction: SyncContraction


@dataclass(frozen=True)
class BranchedRun:
    """What was measured on a BlockBatch run: events of every branch, dispersions, synchronisations.

    dispersions  (step, D_t) after every forward of at least two branches with masks, on the caches themselves
    ratios       sketched distance / distance of every pair of them apart
    """

    events: list[CacheEvent] = field(default_factory=list)
    syncs: list[BranchSync] = field(default_factory=list)
    dispersions: list[tuple[int, float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
