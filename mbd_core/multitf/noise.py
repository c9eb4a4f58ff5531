"""Noise-schedules: a mask ratio for each block of a noise-group (paper App. B.2, B.5).

A schedule is a function of the group size, the bounds and a generator.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NoiseBounds:
    """The mask-ratio range of Table 5 and its margin; `t_eff` is Eq. B.3."""

    t_low: float = 0.001
    t_high: float = 1.0
    margin: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 <= self.t_low < self.t_high <= 1.0:
            raise ValueError(f"noise bounds need 0 <= t_low < t_high <= 1, not {self.t_low} and {self.t_high}")
        if not 0.0 <= self.margin < 1.0:
            raise ValueError(f"margin={self.margin} must lie in [0, 1)")

    @property
    def t_eff(self) -> float:
        return self.t_high - self.margin * (self.t_high - self.t_low)


Schedule = Callable[[int, NoiseBounds, random.Random], list[float]]


def chain_uniform(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Each block uniform between its predecessor's ratio and `t_eff`, from a random floor (Eq. B.4)."""
    floor = rng.uniform(bounds.t_low, bounds.t_eff)
    ratios = []
    for _ in range(size):
        floor = rng.uniform(floor, bounds.t_eff)
        ratios.append(floor)
    return ratios


def sorted_uniform(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Independent uniform ratios in ascending order (Alg. 3)."""
    return sorted(rng.uniform(bounds.t_low, bounds.t_high) for _ in range(size))


def independent_uniform(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Independent uniform ratios; for groups of one block this is teacher forcing's `t ~ U` (Eq. 2.6)."""
    return [rng.uniform(bounds.t_low, bounds.t_high) for _ in range(size)]


SCHEDULES: dict[str, Schedule] = {
    "chain_uniform": chain_uniform,
    "sorted_uniform": sorted_uniform,
    "independent_uniform": independent_uniform,
}
ScheduleName = Literal["chain_uniform", "sorted_uniform", "independent_uniform"]
Rounding = Literal["floor", "ceil"]


def num_masked(ratio: float, num_maskable: int, rounding: Rounding) -> int:
    """Positions to mask of `num_maskable` at `ratio`: `floor` as Alg. 1 line 13, or `ceil`.

    With `floor` and `t_eff < 1` no block is ever fully masked, although decoding starts every block so; `ceil` makes
    the count uniform on 1..num_maskable for a uniform ratio. Small blocks need it (docs/findings.md).
    """
    exact = ratio * num_maskable
    return min(num_maskable, math.floor(exact) if rounding == "floor" else math.ceil(exact))
