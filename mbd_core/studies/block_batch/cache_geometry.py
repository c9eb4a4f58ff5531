"""KV caches as points: BlockBatch's trajectory coordinates (Eqs. 3 and 4) and the dispersion of branches (App. C.4).

A cache is one vector: all keys and values of a lane, flattened position by position.

Shape legend: N events or branches, V numbers of one cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Coordinates:
    """Caches in the frame of Eq. 3: z along the anchor, (a, q) in the tangent plane, and the length of the rest.

    frame  (3, V): u0, e1, e2, orthonormal; e1 or e2 is zero if the residuals do not span it
    """

    anchor: Array
    frame: Array
    z_N: Array
    a_N: Array
    q_N: Array
    rest_N: Array

    @property
    def points(self) -> Array:
        """(N, 3)."""
        return np.stack((self.z_N, self.a_N, self.q_N), axis=1)


def coordinates(caches_NV: Array, initial_N: Sequence[bool]) -> Coordinates:
    """Eqs. 3 and 4: the anchor c0 is the mean of the initial caches, u0 its direction, e1 and e2 the leading right
    singular vectors of the centred residuals. `ValueError` without an initial cache, or if the anchor is zero."""
    if len(initial_N) != len(caches_NV) or not any(initial_N):
        raise ValueError(f"{sum(initial_N)} of {len(caches_NV)} caches are initial ({len(initial_N)} flags); give one")
    anchor = caches_NV[np.asarray(initial_N)].mean(axis=0)
    norm = np.linalg.norm(anchor)
    if norm == 0:
        raise ValueError("the anchor is the zero vector and has no direction; give caches that hold keys")
    u0 = anchor / norm
    delta = caches_NV - anchor
    z = delta @ u0
    residual = delta - z[:, None] * u0
    centred = residual - residual.mean(axis=0)
    _, strength, right = np.linalg.svd(centred, full_matrices=False)
    tangents = np.zeros((2, len(anchor)))
    for i in range(min(2, len(strength))):
        if strength[i] > 1e-9 * max(float(np.linalg.norm(caches_NV)), 1.0):
            tangents[i] = right[i]
    a, q = residual @ tangents[0], residual @ tangents[1]
    rest = np.linalg.norm(residual - a[:, None] * tangents[0] - q[:, None] * tangents[1], axis=1)
    return Coordinates(anchor, np.stack((u0, *tangents)), z, a, q, rest)


def dispersion(caches_NV: Array) -> float:
    """D_t: the mean squared distance over ordered pairs of branches at one event (App. C.4); 0 for a single one."""
    count = len(caches_NV)
    if count < 2:
        return 0.0
    spread = caches_NV - caches_NV.mean(axis=0)
    return float(2 * count * (spread**2).sum() / (count * (count - 1)))


def pair_dispersion(squared_BB: Array) -> float:
    """`dispersion` of B branches, from their squared distances."""
    count = len(squared_BB)
    return float(squared_BB.sum() / (count * (count - 1))) if count > 1 else 0.0


@dataclass(frozen=True)
class SyncContraction:
    """The dispersion of the branches before (`pre`) and after (`post`) a synchronisation copied lanes."""

    pre: float
    post: float

    @property
    def gamma(self) -> float | None:
        """Gamma = D_post / D_pre; `None` if D_pre is 0."""
        return self.post / self.pre if self.pre > 0 else None


def sync_contraction(squared_BB: Array, copies: Sequence[tuple[int, int]]) -> SyncContraction:
    """The dispersion before and after `copies` (source, target), in order, of branches at these squared distances.

    A target gets the distances of its source, so no cache is needed.
    """
    now_BB = squared_BB.copy()
    for source, target in copies:
        now_BB[target] = now_BB[source]
        now_BB[:, target] = now_BB[:, source]
        now_BB[target, target] = 0.0
    return SyncContraction(pair_dispersion(squared_BB), pair_dispersion(now_BB))
