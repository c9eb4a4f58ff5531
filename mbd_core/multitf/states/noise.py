"""Noise-schedules: mask ratios of a noise-group's blocks, by a formula or fitted to traces (App. B.2, B.5).

A schedule is a function of the group size, the bounds and a generator.
"""

import math
import random
from collections.abc import Callable
from typing import Annotated, Literal

from mbd_core.fields import STATES, Flag, Ge, Gt, Le, configuration
from mbd_core.multitf.states.fitted_noise import FittedNoise


@configuration(panel=STATES)
class NoiseBounds:
    """The mask-ratio range of Table 5 and its margin; `t_eff` is Eq. B.3.

    `gamma` is the bias of `power_law`. `slots` are the ranges of `slot_ranges`, one for each place in a noise-group;
    further blocks use the last range. The schedule `fitted` draws from `fitted`.
    """

    t_low: Annotated[float, Ge(0), Le(1)] = 0.001
    """The lowest mask ratio."""
    t_high: Annotated[float, Ge(0), Le(1)] = 1.0
    """The highest mask ratio."""
    margin: Annotated[float, Ge(0), Le(1)] = 0.01
    """Share of the range that is left out at its upper end."""
    gamma: Annotated[float, Gt(0)] = 2.0
    """The bias of power_law."""
    slots: Annotated[tuple[tuple[float, float], ...], Flag(name="--noise-slots", metavar="[[LOW,HIGH],...]")] = ()
    """Ranges of slot_ranges, one for each slot."""
    fitted: FittedNoise | None = None

    def __post_init__(self) -> None:
        if not self.t_low < self.t_high:
            raise ValueError(f"noise bounds need 0 <= t_low < t_high <= 1, not {self.t_low} and {self.t_high}")
        if self.margin == 1.0:
            raise ValueError("margin=1.0 must be below 1")
        for ends in self.slots:
            if len(ends) != 2 or not 0.0 <= ends[0] <= ends[1] <= 1.0:
                raise ValueError(f"slots={self.slots}: a range needs 0 <= low <= high <= 1")

    @property
    def t_eff(self) -> float:
        return self.t_high - self.margin * (self.t_high - self.t_low)


NoiseSchedule = Callable[[int, NoiseBounds, random.Random], list[float]]


def chain_uniform(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Each block uniform between its predecessor's ratio and `t_eff`, from a random floor (Eq. B.4)."""
    return _chain(size, rng.uniform(bounds.t_low, bounds.t_eff), bounds, rng)


def chain_from_low(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """The chain from `t_low` instead of a random floor; the released code's `chain_uniform_opt`."""
    return _chain(size, bounds.t_low, bounds, rng)


def _chain(size: int, floor: float, bounds: NoiseBounds, rng: random.Random) -> list[float]:
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


def sample_uniform(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """One uniform ratio for all blocks of a noisy stream (BD3LM and MDLM as dllm trains them)."""
    return [rng.uniform(bounds.t_low, bounds.t_high)] * size


def power_law(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """The paper's random scheduler (Table 2b): each block takes `1 - (1 - u)^gamma` of the rest up to `t_eff`."""
    ratio, ratios = bounds.t_low, []
    for _ in range(size):
        ratio += (bounds.t_eff - ratio) * (1.0 - (1.0 - rng.random()) ** bounds.gamma)
        ratios.append(ratio)
    return ratios


def linear(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Even steps from `t_low` to `t_eff`, without a draw: Table 2b's D2F-style noise. A single block is uniform."""
    if size == 1:
        return [rng.uniform(bounds.t_low, bounds.t_eff)]
    return [bounds.t_low + (bounds.t_eff - bounds.t_low) * i / (size - 1) for i in range(size)]


def stratified(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """One uniform ratio in each of `size` equal parts of the range; the released code's `linear_random`."""
    return [bounds.t_low + (bounds.t_eff - bounds.t_low) * (i + rng.random()) / size for i in range(size)]


def ascending(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Even steps from a uniform start towards 1, which no block reaches; the released code's `linear_ascend`."""
    start = rng.uniform(bounds.t_low, bounds.t_eff)
    return [start + (1.0 - start) * i / size for i in range(size)]


def d2f_monotonic(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """D2F's noise over a response: a uniform first ratio, then uniform increments that cannot pass `t_high`.

    D2F trains with `t_low` = 0.2 and `t_high` = 0.7.
    """
    ratio = rng.uniform(bounds.t_low, bounds.t_high)
    step = (bounds.t_high - ratio) / max(1, size - 1)
    ratios = [ratio]
    for _ in range(size - 1):
        ratios.append(min(bounds.t_high, ratios[-1] + step * rng.random()))
    return ratios


def slot_ranges(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Each place in the group uniform in its own range (`bounds.slots`), independent of other places."""
    last_slot = len(bounds.slots) - 1
    return [rng.uniform(*bounds.slots[min(i, last_slot)]) for i in range(size)]


def fitted(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Mask ratios measured in decode traces (`bounds.fitted`), whatever `t_low` and `t_high` are."""
    assert bounds.fitted is not None
    return bounds.fitted.draw(size, rng)


ScheduleName = Literal[
    "chain_uniform",
    "chain_from_low",
    "sorted_uniform",
    "independent_uniform",
    "sample_uniform",
    "power_law",
    "linear",
    "stratified",
    "ascending",
    "d2f_monotonic",
    "slot_ranges",
    "fitted",
]
SCHEDULES: dict[ScheduleName, NoiseSchedule] = {
    "chain_uniform": chain_uniform,
    "chain_from_low": chain_from_low,
    "sorted_uniform": sorted_uniform,
    "independent_uniform": independent_uniform,
    "sample_uniform": sample_uniform,
    "power_law": power_law,
    "linear": linear,
    "stratified": stratified,
    "ascending": ascending,
    "d2f_monotonic": d2f_monotonic,
    "slot_ranges": slot_ranges,
    "fitted": fitted,
}
OF_A_STREAM: tuple[ScheduleName, ...] = ("sample_uniform",)
"""Schedules that are drawn once for all blocks of a stream; other schedules are drawn once for each noise-group."""
Rounding = Literal["floor", "ceil", "nearest", "bernoulli"]


SLACK = 1e-4
"""The number of positions for a measured ratio is rounded to a whole number that is at most this far away."""


def num_masked(ratio: float, num_maskable: int, rounding: Rounding, *, slack: float = 0.0) -> int:
    """Positions to mask of `num_maskable` at `ratio`: `floor` as Alg. 1 line 13, or `ceil`.

    With `floor` and `t_eff < 1` no block is ever fully masked, although decoding starts every block fully masked;
    `ceil` makes the count uniform on 1..num_maskable for a uniform ratio. Small blocks need `ceil`
    (research/ledger/gsm_mini.md). A product within `slack` of a whole number counts as that number. `nearest`
    rounds half to even.
    """
    exact = ratio * num_maskable
    if rounding == "nearest":
        return round(exact)
    return min(num_maskable, math.floor(exact + slack) if rounding == "floor" else math.ceil(exact - slack))


def choose_masked(
    maskable: range,
    ratio: float,
    rounding: Rounding,
    rng: random.Random,
    *,
    slack: float = 0.0,
    half_life: float | None = None,
) -> list[int]:
    """The positions of a block to mask: `num_masked` of them, or each independently with probability `ratio`.

    `half_life`: positions are drawn without replacement by the weights `exp(ln 2 / half_life * (1 - ratio) * i)`, so
    with a ratio near 0 a position `half_life` later is masked twice as often; with ratio 1 all positions are alike
    (Efficient-DLM).
    """
    if rounding == "bernoulli":
        return [i for i in maskable if rng.random() < ratio]
    count = num_masked(ratio, len(maskable), rounding, slack=slack)
    if half_life is None:
        return rng.sample(maskable, count)
    slope = math.log(2.0) / half_life * (1.0 - ratio)
    keys = {i: slope * i + _gumbel(rng) for i in maskable}  # the largest of such keys are a draw by the weights
    return sorted(maskable, key=lambda i: -keys[i])[:count]


def _gumbel(rng: random.Random) -> float:
    return -math.log(rng.expovariate(1.0) or math.ulp(0.0))
