"""A noise-schedule fitted to decode traces: mask ratios of running-sets, drawn as often as they occurred."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from mbd_core.fields import Ge, Le, configuration, load
from mbd_core.files import write_json
from mbd_core.json_text import parse_json

Ratios = tuple[Annotated[float, Ge(0), Le(1)], ...]
Count = Annotated[int, Ge(1)]


@configuration()
class FittedNoise:
    """Measured states: the mask ratios of the active blocks in a forward, in their order, and the states' counts.

    A noise-group of n blocks takes one of the states with n active blocks. If none was measured, it takes the first n
    blocks of a state with the next larger number, because a block does not see the blocks after it. Blocks beyond the
    largest number are fully masked, as at the beginning of decoding. `source` names the measurement.
    """

    states: tuple[tuple[Ratios, Count], ...]
    source: str

    def __post_init__(self) -> None:
        if not self.states:
            raise ValueError("states is empty: no forward with a masked position was measured")
        if not all(any(ratios) for ratios, _ in self.states):
            raise ValueError("states: each needs a mask ratio above 0")

    def draw(self, size: int, rng: random.Random) -> list[float]:
        """The mask ratios of a noise-group of `size` blocks."""
        known_size = min((n for n in self._by_size if n >= size), default=max(self._by_size))
        states, up_to = self._by_size[known_size]
        (ratios,) = rng.choices(states, cum_weights=up_to)
        return [*ratios[:size], *[1.0] * (size - known_size)]

    @cached_property
    def _by_size(self) -> dict[int, tuple[list[Ratios], list[int]]]:
        """For each number of active blocks its states, and their cumulative counts."""
        sizes = sorted({len(ratios) for ratios, _ in self.states})
        of_size = {n: [state for state in self.states if len(state[0]) == n] for n in sizes}
        return {n: ([r for r, _ in states], list(accumulate(c for _, c in states))) for n, states in of_size.items()}


def fit_noise(states: Iterable[Sequence[float]], *, source: str) -> FittedNoise:
    """The schedule that draws these states as often as they are given. States without a mask train nothing and are
    dropped.

    Raises `ValueError` if none is left.
    """
    counts = Counter(tuple(map(float, ratios)) for ratios in states if any(ratios))
    return FittedNoise(states=tuple(sorted(counts.items())), source=source)


@configuration()
class NoiseState:
    """Mask ratios of a forward's active blocks, and how many forwards had them."""

    ratios: Ratios
    count: Count


@configuration()
class NoiseFile:
    """The file of a fitted schedule."""

    kind: Literal["fitted noise"]
    source: str
    states: tuple[NoiseState, ...]


def write_noise(path: Path, noise: FittedNoise) -> None:
    """Write a fitted schedule as JSON."""
    states = tuple(NoiseState(ratios=ratios, count=count) for ratios, count in noise.states)
    write_json(path, asdict(NoiseFile(kind="fitted noise", source=noise.source, states=states)))


def read_noise(path: Path) -> FittedNoise:
    """The content of `write_noise`'s file. Raises `ValueError`, one sentence, naming the file and the wrong field."""
    try:
        content: NoiseFile = load(NoiseFile, parse_json(path.read_bytes(), "it"), noun="field")
        return FittedNoise(
            states=tuple((state.ratios, state.count) for state in content.states), source=content.source
        )
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no fitted noise-schedule: {error}") from None
