"""Noise-schedules: mask ratios of a noise-group's blocks, by a formula or fitted to traces (App. B.2, B.5).

A schedule is a function of the group size, the bounds and a generator.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from mbd_core.fields import STATES, Flag, Ge, Gt, Le, configuration
from mbd_core.files import write_json
from mbd_core.json_text import parse_json

# A noise-schedule fitted to decode traces: mask ratios as running-sets had them, drawn as often as they occurred.

Ratios = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class FittedNoise:
    """Measured states: the mask ratios of the active blocks in a forward, in their order, and how often they occurred.

    A noise-group of n blocks takes one of the states with n active blocks. If none was measured, it takes the first n
    blocks of one with the next larger number, since a block does not see the blocks behind it; and blocks beyond the
    largest number are fully masked, as decoding begins them. `source` says what was measured.
    """

    states: tuple[tuple[Ratios, int], ...]
    source: str

    def __post_init__(self) -> None:
        if not self.states:
            raise ValueError("states is empty: no forward with a masked position was measured")
        for number, (ratios, count) in enumerate(self.states):
            are_ratios = all(isinstance(t, float | int) and 0.0 <= t <= 1.0 for t in ratios) and any(ratios)
            if not are_ratios or not isinstance(count, int) or count < 1:
                raise ValueError(
                    f"states.{number}: {list(ratios)} counted {count} times must be mask ratios from 0 to 1, not all "
                    "0, counted at least once"
                )

    def draw(self, size: int, rng: random.Random) -> list[float]:
        """The mask ratios of a noise-group of `size` blocks."""
        known_size = min((n for n in self._by_size if n >= size), default=max(self._by_size))
        states, up_to = self._by_size[known_size]
        (ratios,) = rng.choices(states, cum_weights=up_to)
        return [*ratios[:size], *[1.0] * (size - known_size)]

    @cached_property
    def _by_size(self) -> dict[int, tuple[list[Ratios], list[int]]]:
        """For each number of active blocks its states, and their counts summed up to each."""
        sizes = sorted({len(ratios) for ratios, _ in self.states})
        of_size = {n: [state for state in self.states if len(state[0]) == n] for n in sizes}
        return {n: ([r for r, _ in states], list(accumulate(c for _, c in states))) for n, states in of_size.items()}


def fit_noise(states: Iterable[Sequence[float]], *, source: str) -> FittedNoise:
    """The schedule that draws these states as often as they are given; those without a mask train nothing.

    Raises `ValueError` if none is left.
    """
    counts = Counter(tuple(map(float, ratios)) for ratios in states if any(ratios))
    return FittedNoise(states=tuple(sorted(counts.items())), source=source)


KIND = "fitted noise"


def write_noise(path: Path, noise: FittedNoise) -> None:
    """Write a fitted schedule as JSON."""
    states = [{"ratios": list(ratios), "count": count} for ratios, count in noise.states]
    write_json(path, {"kind": KIND, "source": noise.source, "states": states})


def read_noise(path: Path) -> FittedNoise:
    """What `write_noise` wrote; `ValueError`, one sentence, names the file and the field that is wrong."""
    try:
        fields = parse_json(path.read_bytes(), "it")
        _check_fields(fields, "it", "kind", "source", "states")
        if fields["kind"] != KIND:
            raise ValueError(f"kind: {fields['kind']!r} must be {KIND!r}")
        if not isinstance(fields["source"], str):
            raise ValueError(f"source: {fields['source']!r} must be text")
        for number, state in enumerate(fields["states"]):
            _check_fields(state, f"states.{number}", "ratios", "count")
        states = tuple((tuple(state["ratios"]), state["count"]) for state in fields["states"])
        return FittedNoise(states=states, source=fields["source"])
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no fitted noise-schedule: {error}") from None


def _check_fields(value: Any, name: str, *fields: str) -> None:
    """Raise `ValueError` for what is no JSON object of exactly these fields."""
    if not isinstance(value, dict) or value.keys() != set(fields):
        wrong = sorted(value.keys() ^ set(fields)) if isinstance(value, dict) else "no object"
        raise ValueError(f"{name} must have the fields {', '.join(fields)} and no others; wrong: {wrong}")


# Noise-schedules: a mask ratio for each block of a noise-group (paper App. B.2, B.5).


@configuration(panel=STATES)
class NoiseBounds:
    """The mask-ratio range of Table 5 and its margin; `t_eff` is Eq. B.3.

    `gamma` is the bias of `power_law`. `slots` are the ranges of `slot_ranges`, one for each place in a noise-group;
    groups with more blocks use the last one again. `fitted` is what the schedule of that name draws from.
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
    """Ranges of slot_ranges, one a slot."""
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


Schedule = Callable[[int, NoiseBounds, random.Random], list[float]]


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


def power_law(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """The paper's random scheduler (Table 2b): each block takes `1 - (1 - u)^gamma` of what is left up to `t_eff`."""
    ratio, ratios = bounds.t_low, []
    for _ in range(size):
        ratio += (bounds.t_eff - ratio) * (1.0 - (1.0 - rng.random()) ** bounds.gamma)
        ratios.append(ratio)
    return ratios


def linear(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Even steps from `t_low` to `t_eff`, nothing drawn: Table 2b's D2F-style noise. One block alone is uniform."""
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
    """Each place in the group uniform in a range of its own (`bounds.slots`), independent of the others."""
    last_slot = len(bounds.slots) - 1
    return [rng.uniform(*bounds.slots[min(i, last_slot)]) for i in range(size)]


def fitted(size: int, bounds: NoiseBounds, rng: random.Random) -> list[float]:
    """Mask ratios as they were measured in decode traces (`bounds.fitted`), whatever `t_low` and `t_high` are."""
    assert bounds.fitted is not None
    return bounds.fitted.draw(size, rng)


ScheduleName = Literal[
    "chain_uniform",
    "chain_from_low",
    "sorted_uniform",
    "independent_uniform",
    "power_law",
    "linear",
    "stratified",
    "ascending",
    "d2f_monotonic",
    "slot_ranges",
    "fitted",
]
SCHEDULES: dict[ScheduleName, Schedule] = {
    "chain_uniform": chain_uniform,
    "chain_from_low": chain_from_low,
    "sorted_uniform": sorted_uniform,
    "independent_uniform": independent_uniform,
    "power_law": power_law,
    "linear": linear,
    "stratified": stratified,
    "ascending": ascending,
    "d2f_monotonic": d2f_monotonic,
    "slot_ranges": slot_ranges,
    "fitted": fitted,
}
Rounding = Literal["floor", "ceil", "bernoulli"]


SLACK = 1e-4
"""How near to a whole number of positions a measured ratio's product counts as it: such ratios are rounded."""


def num_masked(ratio: float, num_maskable: int, rounding: Rounding, *, slack: float = 0.0) -> int:
    """Positions to mask of `num_maskable` at `ratio`: `floor` as Alg. 1 line 13, or `ceil`.

    With `floor` and `t_eff < 1` no block is ever fully masked, although decoding starts every block so; `ceil` makes
    the count uniform on 1..num_maskable for a uniform ratio. Small blocks need it (research/README.md). A
    product within `slack` of a whole number counts as that number.
    """
    exact = ratio * num_maskable
    return min(num_maskable, math.floor(exact + slack) if rounding == "floor" else math.ceil(exact - slack))


def choose_masked(
    maskable: range, ratio: float, rounding: Rounding, rng: random.Random, *, slack: float = 0.0
) -> list[int]:
    """The positions of a block to mask: `num_masked` of them, or each by itself with probability `ratio`."""
    if rounding == "bernoulli":
        return [i for i in maskable if rng.random() < ratio]
    return rng.sample(maskable, num_masked(ratio, len(maskable), rounding, slack=slack))
