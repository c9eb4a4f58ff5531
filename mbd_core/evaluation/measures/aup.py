"""AUP, accuracy under parallelism, in both definitions in use. A point is (TPF, accuracy in percent).

Report either number only together with its points. The definitions differ much: a single point scores 0 under Eq. 4.1
and TPF times accuracy under d3LLM's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

AupPoint = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class WeightedAup:
    """d3LLM's AUP, the points that it covers, and the points dropped because their accuracy is too low."""

    value: float
    points: tuple[AupPoint, ...]
    dropped: tuple[AupPoint, ...]
    y_max: float
    alpha: float


def aup_eq41(points: Iterable[AupPoint]) -> float:
    """The area of the trapezoids between neighbouring points sorted by TPF (MBD-LMs paper Eq. 4.1)."""
    return sum((y0 + y1) / 2 * (p1 - p0) for (p0, y0), (p1, y1) in pairwise(_sorted(points)))


def aup_d3llm(
    points: Iterable[AupPoint], *, y_max: float, alpha: float = 3.0, y_min_offset: float = 5.0
) -> WeightedAup:
    """d3LLM's AUP: the rectangle up to the first point, then trapezoids of accuracies weighted by W.

    `W(y) = min(exp(-alpha * (1 - y / y_max)), 1)`, `y_max` the best accuracy of any method on the task. Points whose
    accuracy is more than `y_min_offset` below that of the slowest point are returned as `dropped`; the released code
    raises an error instead if the fastest point is one of them. Raises `ValueError` for no points or a `y_max` that is
    not above 0 although an accuracy is.
    """
    curve = _sorted(points)
    floor = curve[0][1] - y_min_offset
    accurate = [point for point in curve if point[1] >= floor]
    if y_max <= 0 and any(y > 0 for _, y in accurate):
        raise ValueError(f"y_max={y_max} must be the best accuracy of the task, in percent")

    def weighted_accuracy(y: float) -> float:
        return y * min(math.exp(-alpha * (1 - y / y_max)), 1.0) if y > 0 else 0.0

    area = accurate[0][0] * accurate[0][1]
    for (p0, y0), (p1, y1) in pairwise(accurate):
        area += (p1 - p0) * (weighted_accuracy(y1) + weighted_accuracy(y0)) / 2
    return WeightedAup(
        value=area,
        points=tuple(accurate),
        dropped=tuple(point for point in curve if point[1] < floor),
        y_max=y_max,
        alpha=alpha,
    )


def _sorted(points: Iterable[AupPoint]) -> list[AupPoint]:
    """The points by TPF, with equal TPF by falling accuracy, so that the order of the input does not matter."""
    ordered = sorted(((float(p), float(y)) for p, y in points), key=lambda point: (point[0], -point[1]))
    if not ordered:
        raise ValueError("AUP needs at least one (TPF, accuracy) point")
    return ordered
