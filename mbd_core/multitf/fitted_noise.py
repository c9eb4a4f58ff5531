"""A noise-schedule fitted to decode traces: mask ratios as running-sets had them, drawn as often as they occurred."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

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
            if not ratios or not all(0.0 <= t <= 1.0 for t in ratios) or not any(ratios) or count < 1:
                raise ValueError(
                    f"states.{number}: {list(ratios)} counted {count} times must be mask ratios from 0 to 1, not all "
                    "0, counted at least once"
                )

    def draw(self, size: int, rng: random.Random) -> list[float]:
        """The mask ratios of a noise-group of `size` blocks."""
        measured = min((n for n in self._by_size if n >= size), default=max(self._by_size))
        states, up_to = self._by_size[measured]
        (ratios,) = rng.choices(states, cum_weights=up_to)
        return [*ratios[:size], *[1.0] * (size - measured)]

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
