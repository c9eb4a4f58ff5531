"""A front keeps what nothing beats, and each speed has its point."""

import random
from typing import Any

import pytest

from mbd_core.decoding.blocks.methods import KEY, SpeedFront, SpeedPoint, pareto_points, read_front


def point(accuracy: float, tpf: float, **decoding: Any) -> SpeedPoint:
    return SpeedPoint(decoding=decoding, accuracy=accuracy, tpf=tpf)


FRONT = SpeedFront(points=(point(90, 2), point(80, 3), point(79, 6), point(20, 10)), tasks=("a",), num_samples=7)


def test_the_front_is_what_no_other_point_beats() -> None:
    rng = random.Random(3)
    for size in (1, 2, 5, 40):
        measured = [point(rng.randint(0, 9), rng.randint(1, 9)) for _ in range(size)]
        front = pareto_points(measured)
        SpeedFront(points=front)  # it is one
        for p in measured:
            at_least = [q for q in front if q.accuracy >= p.accuracy and q.tpf >= p.tpf]
            assert at_least, "each point is on the front or beaten by one of it"
        for p in front:
            better = [q for q in measured if q.accuracy >= p.accuracy and q.tpf >= p.tpf]
            assert all((q.accuracy, q.tpf) == (p.accuracy, p.tpf) for q in better)


def test_a_speed_is_the_nearest_point_along_the_tokens_per_forward() -> None:
    assert FRONT.speeds == [0.0, 0.125, 0.5, 1.0]
    chosen = {speed: FRONT.at(speed)[1].tpf for speed in (0, 0.06, 0.07, 0.3, 0.32, 0.5, 0.75, 0.76, 1)}
    assert chosen == {0: 2, 0.06: 2, 0.07: 3, 0.3: 3, 0.32: 6, 0.5: 6, 0.75: 6, 0.76: 10, 1: 10}
    assert all(FRONT.at(speed)[0] == speed for speed in FRONT.speeds)
    alone = SpeedFront(points=(point(90, 2),))
    assert [alone.at(speed)[0] for speed in (0, 0.5, 1)] == [0, 0, 0]


def test_what_is_stored_is_read_again() -> None:
    front = SpeedFront(points=(point(90, 2, tau_m2t=0.9), point(80, 3, tau_m2t=0.5, buffer_size=2)), tasks=("a",))
    assert read_front({KEY: front.generation_fields(), "temperature": 1}, block_size=4) == front
    assert read_front({"buffer_size": 2}, block_size=4) is None
    assert [p["speed"] for p in front.health_fields()["points"]] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ([], "must be an object"),
        ({"points": {}}, "must be an object"),
        ({"points": []}, "no points"),
        ({"points": [{"accuracy": 9, "tpf": "2", "decoding": {}}]}, "points.0: needs the numbers"),
        ({"points": [{"accuracy": 9, "tpf": 2}]}, "points.0: decoding must be"),
        ({"points": [{"accuracy": 9, "tpf": 2, "decoding": {"tau": 1}}]}, "points.0: unknown decoding field 'tau'"),
        ({"points": [{"accuracy": 9, "tpf": 2, "decoding": {"block_size": 8}}]}, "points.0: block_size=8"),
        ({"points": [{"accuracy": a, "tpf": 2, "decoding": {}} for a in (9, 8)]}, "faster and less accurate"),
    ],
)
def test_what_is_no_front_is_refused(stored: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=KEY) as refused:
        read_front({KEY: stored}, block_size=4)
    assert reason in str(refused.value)
