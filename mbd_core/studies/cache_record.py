"""What a watched decoding run leaves of its caches: an event a forward, and what was measured beside it.

Shape legend: C numbers of a sketch.
"""

from dataclasses import dataclass, field
from typing import Literal

from mbd_core.studies.kv_trajectory import Array, BlockMovement, Bound, EventKind, SyncContraction

Kind = Literal["initial", "refresh", "block", "sync"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A branch's cache behind one forward, or behind a synchronisation that overwrote it.

    branch  block length
    step    forwards before this one
    sketch  (C,) float64
    error   distance from a full forward on the tokens that this forward saw, where it was measured
    norm    length of the whole cache, where the error was measured
    """

    branch: int
    step: int
    kind: Kind
    sketch: Array
    error: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class CacheRun:
    """What was measured on one trajectory: its events, and Prop. 1's quantities behind a few of its forwards."""

    events: list[Event] = field(default_factory=list)
    energies: list[tuple[float, float]] = field(default_factory=list)
    projections: list[Bound] = field(default_factory=list)
    movements: list[BlockMovement] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """E behind the first forward and behind each later one."""
        return [e.error for e in self.events if e.error is not None]

    @property
    def kinds(self) -> list[EventKind]:
        """The forwards behind the first."""
        return ["block" if e.kind == "block" else "refresh" for e in self.events[1:]]


@dataclass(frozen=True, kw_only=True)
class Sync:
    """A synchronisation: forwards before it, block lengths of the leader and the overwritten, what D_t did."""

    step: int
    leader: int
    overwritten: tuple[int, ...]
    contraction: SyncContraction


@dataclass(frozen=True)
class BranchedRun:
    """What was measured on a BlockBatch run: events of every branch, dispersions, synchronisations.

    dispersions  (step, D_t) behind every forward of at least two branches with masks, on the caches themselves
    ratios       sketched distance / distance of every pair of them apart
    """

    events: list[Event] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    dispersions: list[tuple[int, float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
