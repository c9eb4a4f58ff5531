"""A model's measured Pareto front of accuracy against speed, and the decoding that stands at each of its points."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mbd_core.decoding.decoding_config import decoding_config, from_fields

KEY = "speed_front"  # of generation_config.json


@dataclass(frozen=True, kw_only=True)
class SpeedPoint:
    """A measured decoding configuration: percent right, and tokens per forward."""

    decoding: Mapping[str, Any]
    accuracy: float
    tpf: float


@dataclass(frozen=True, kw_only=True)
class SpeedFront:
    """Points of which each is faster and less accurate than the one before, and where they were measured.

    `speed` runs along their tokens per forward: 0 is the first point, the most accurate; 1 the last, the fastest.
    """

    points: tuple[SpeedPoint, ...]
    tasks: tuple[str, ...] = ()
    num_samples: int = 0

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"{KEY}: it has no points")
        for slow, fast in zip(self.points, self.points[1:], strict=False):
            if not (slow.tpf < fast.tpf and slow.accuracy > fast.accuracy):
                raise ValueError(
                    f"{KEY}: accuracy {fast.accuracy:g} at {fast.tpf:g} tokens per forward follows accuracy "
                    f"{slow.accuracy:g} at {slow.tpf:g}; each point must be faster and less accurate than the last"
                )

    @property
    def speeds(self) -> list[float]:
        """The speed at which each point stands, rounded to four digits."""
        first, last = self.points[0].tpf, self.points[-1].tpf
        return [round((p.tpf - first) / (last - first), 4) if last > first else 0.0 for p in self.points]

    def at(self, speed: float) -> tuple[float, SpeedPoint]:
        """The point nearest to `speed`, the slower of two, and its own speed."""
        return min(zip(self.speeds, self.points, strict=True), key=lambda pair: (abs(pair[0] - speed), pair[0]))

    def shown(self) -> dict[str, Any]:
        """The front as `/health` names it."""
        points = [{"speed": s, **asdict(p)} for s, p in zip(self.speeds, self.points, strict=True)]
        return {"tasks": list(self.tasks), "num_samples": self.num_samples, "points": points}

    def stored(self) -> dict[str, Any]:
        """The front as `generation_config.json` holds it, under `KEY`."""
        return {"tasks": list(self.tasks), "num_samples": self.num_samples, "points": [asdict(p) for p in self.points]}


def read_front(generation: Mapping[str, Any], *, block_size: int) -> SpeedFront | None:
    """The front in a `generation_config.json`, `None` if it has none.

    Raises `ValueError` for one that is no front, or whose decoding the model cannot honour.
    """
    stored = generation.get(KEY)
    if stored is None:
        return None
    if not isinstance(stored, Mapping) or not isinstance(stored.get("points"), list):
        raise ValueError(f"{KEY} must be an object with a list of points; write it with jobs/speed_front.py")
    points = []
    for number, point in enumerate(stored["points"]):
        numbers = [point.get(name) for name in ("accuracy", "tpf")] if isinstance(point, Mapping) else []
        if not numbers or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
            raise ValueError(f"{KEY}.points.{number}: needs the numbers accuracy and tpf, and decoding")
        if not isinstance(point.get("decoding"), Mapping):
            raise ValueError(f"{KEY}.points.{number}: decoding must be an object")
        try:
            decoding_config(generation, point["decoding"], block_size=block_size)
        except ValueError as error:
            raise ValueError(f"{KEY}.points.{number}: {error}") from None
        points.append(from_fields(SpeedPoint, point))
    return SpeedFront(
        points=tuple(points), tasks=tuple(stored.get("tasks", ())), num_samples=int(stored.get("num_samples", 0))
    )


def pareto_points(measured: Iterable[SpeedPoint]) -> tuple[SpeedPoint, ...]:
    """The points that no other one beats in accuracy or speed without losing in the other, the slowest first."""
    front: list[SpeedPoint] = []
    for point in sorted(measured, key=lambda p: (-p.tpf, -p.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return tuple(reversed(front))
