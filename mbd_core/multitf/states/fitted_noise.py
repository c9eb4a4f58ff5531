"""A noise-schedule fitted to decode traces: mask ratios of running-sets, drawn as often as they occurred."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from mbd_core.files import write_json
from mbd_core.json_text import parse_json

Ratios = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class FittedNoise:
    """Measured states: the mask ratios of the active blocks in a forward, in their order, and the states' counts.

    A noise-group of n blocks takes one of the states with n active blocks. If none was measured, it takes the first n
    blocks of a state with the next larger number, because a block does not see the blocks behind it. Blocks beyond the
    largest number are fully masked, as at the beginning of decoding. `source` names the measurement.
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


KIND = "fitted noise"


def write_noise(path: Path, noise: FittedNoise) -> None:
    """Write a fitted schedule as JSON."""
    states = [{"ratios": list(ratios), "count": count} for ratios, count in noise.states]
    write_json(path, {"kind": KIND, "source": noise.source, "states": states})


def read_noise(path: Path) -> FittedNoise:
    """The content of `write_noise`'s file. Raises `ValueError`, one sentence, naming the file and the wrong field."""
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
    """Raises `ValueError` unless the value is a JSON object of exactly these fields."""
    if not isinstance(value, dict) or value.keys() != set(fields):
        wrong = sorted(value.keys() ^ set(fields)) if isinstance(value, dict) else "no object"
        raise ValueError(f"{name} must have the fields {', '.join(fields)} and no others; wrong: {wrong}")
