"""The bounds of BlockBatch's Propositions 1 and 2 (App. C): each check is a measured value and its upper bound.

Shape legend: L positions, D numbers of one position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ForwardKind = Literal["block", "refresh"]


@dataclass(frozen=True)
class BoundedValue:
    """A measured value and its upper bound; `holds` allows float rounding."""

    value: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.value <= self.bound * (1 + 1e-6) + 1e-9


def projected_energy(full_LD: Array, block_size: int) -> tuple[float, float]:
    """Lemma 1: the mean energy of a full refresh's correction inside a block, and m / L of its total energy.

    The two must be equal. The mean is taken over the blocks that tile the canvas, so each position is in one of them
    with probability m / L. Raises `ValueError` if the blocks do not tile the canvas.
    """
    blocks = _tiles(full_LD, block_size)
    mean = float(np.mean([(full_LD[start:stop] ** 2).sum() for start, stop in blocks]))
    return mean, block_size / len(full_LD) * float((full_LD**2).sum())


def projected_norm_bound(full_LD: Array, block_size: int) -> BoundedValue:
    """Prop. 1, first part: E |P_B d_full| <= sqrt(m / L) |d_full|."""
    norms = [np.linalg.norm(full_LD[start:stop]) for start, stop in _tiles(full_LD, block_size)]
    share = np.sqrt(block_size / len(full_LD))
    return BoundedValue(float(np.mean(norms)), float(share * np.linalg.norm(full_LD)))


@dataclass(frozen=True, kw_only=True)
class BlockMovement:
    """Prop. 1's lengths, without the corrections themselves.

    share     m / L
    full      |d_full|
    moved     mean |d_blk| over the blocks that tile the canvas
    residual  mean |d_blk - P_B d_full| over the same blocks
    """

    share: float
    full: float
    moved: float
    residual: float

    @property
    def bound(self) -> BoundedValue:
        """E |d_blk| <= sqrt(m / L) |d_full| + E |r|."""
        return BoundedValue(self.moved, float(np.sqrt(self.share)) * self.full + self.residual)

    @property
    def against_refresh(self) -> BoundedValue | None:
        """E |d_blk| < |d_full| if its premise E |r| < (1 - sqrt(m / L)) |d_full| is met, else `None`."""
        premise = self.residual < (1 - float(np.sqrt(self.share))) * self.full
        return BoundedValue(self.moved, self.full) if premise else None


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

    def after_blocks(self, error: float, count: int) -> float:
        """Bound on the error `count` block forwards after a refresh that left `error`."""
        a = 1 + self.growth
        return a**count * error + self.block_noise * sum(a**i for i in range(count))


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


def error_bounds(errors: Sequence[float], kinds: Sequence[ForwardKind], drift: Drift) -> list[BoundedValue]:
    """Prop. 2 along a run: each event's error and its bound by the recurrence from the first error."""
    _check_events(errors, kinds)
    bound, bounds = errors[0], []
    for i, kind in enumerate(kinds):
        refresh_bound = drift.contraction * bound + drift.refresh_noise
        bound = refresh_bound if kind == "refresh" else drift.after_blocks(bound, 1)
        bounds.append(BoundedValue(errors[i + 1], bound))
    return bounds


def _check_events(errors: Sequence[float], kinds: Sequence[ForwardKind]) -> None:
    if len(errors) != len(kinds) + 1:
        raise ValueError(
            f"{len(errors)} errors for {len(kinds)} events; give the first error and one after each event"
        )
