"""AUP, accuracy under parallelism, in both definitions in use, of one curve or of many draws of it at once.

The points of a curve are an array (K, 2) of TPF and accuracy in percent, in any order; D draws of it are (K, 2, D).
Report either number only together with its points. The definitions differ much: a single point scores 0 under Eq. 4.1
and TPF times accuracy under d3LLM's.
"""

import numpy as np
from numpy.typing import ArrayLike

AupPoint = tuple[float, float]
ALPHA = 3.0
Y_MIN_OFFSET = 5.0


def sorted_points(points: ArrayLike) -> np.ndarray:
    """The points by TPF, with equal TPF by falling accuracy, so that the order of the input does not matter."""
    curve = np.asarray(points, dtype=float)
    if not len(curve):
        raise ValueError("AUP needs at least one (TPF, accuracy) point")
    order = np.lexsort((-curve[:, 1], curve[:, 0]), axis=0)
    return np.take_along_axis(curve, order[:, None], 0)


def are_kept(curve: np.ndarray, *, y_min_offset: float = Y_MIN_OFFSET) -> np.ndarray:
    """Which of the sorted points d3LLM keeps: points at most `y_min_offset` less accurate than the slowest."""
    return ~(curve[:, 1] < curve[0, 1] - y_min_offset)


def aup_eq41(points: ArrayLike) -> np.ndarray:
    """The area of the trapezoids between neighbouring points (MBD-LMs paper Eq. 4.1), in each draw."""
    curve = sorted_points(points)
    tpf, accuracy = curve[:, 0], curve[:, 1]
    return (np.diff(tpf, axis=0) * (accuracy[1:] + accuracy[:-1]) / 2).sum(axis=0)


def aup_d3llm(
    points: ArrayLike, *, y_max: ArrayLike, alpha: float = ALPHA, y_min_offset: float = Y_MIN_OFFSET
) -> np.ndarray:
    """d3LLM's AUP: the rectangle up to the first point, then trapezoids of accuracies weighted by W.

    `W(y) = min(exp(-alpha * (1 - y / y_max)), 1)`, `y_max` the best accuracy of any method on the task, in each draw.
    Points that are not kept are left out; the released code raises an error instead if the fastest point is not kept.
    Raises `ValueError` for no points, and if an accuracy is above 0 but `y_max` is not.
    """
    curve, y_max = sorted_points(points), np.asarray(y_max, dtype=float)
    is_kept, tpf, accuracy = are_kept(curve, y_min_offset=y_min_offset), curve[:, 0], curve[:, 1]
    if np.any((y_max <= 0) & is_kept & (accuracy > 0)):
        raise ValueError(f"y_max={y_max} must be the best accuracy of the task, in percent")
    share = np.divide(accuracy, y_max, out=np.zeros_like(accuracy), where=np.broadcast_to(y_max > 0, accuracy.shape))
    weighted_accuracy = accuracy * np.minimum(np.exp(-alpha * (1 - share)), 1.0)
    last_tpf, last_weighted = tpf[0], weighted_accuracy[0]
    area = tpf[0] * accuracy[0]
    for number in range(1, len(curve)):
        trapezoid = (tpf[number] - last_tpf) * (weighted_accuracy[number] + last_weighted) / 2
        area = area + np.where(is_kept[number], trapezoid, 0.0)
        last_tpf = np.where(is_kept[number], tpf[number], last_tpf)
        last_weighted = np.where(is_kept[number], weighted_accuracy[number], last_weighted)
    return area
