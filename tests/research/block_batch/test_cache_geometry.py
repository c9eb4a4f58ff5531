"""Coordinates are an orthonormal frame, and dispersion is the mean over pairs, also after a sync."""

import numpy as np
import pytest

from research.block_batch.caches import coordinates, dispersion, distance_bounds, sync_contraction


def test_coordinates_are_an_orthonormal_frame_and_shorten_distances() -> None:
    rng = np.random.default_rng(0)
    caches = rng.normal(size=(9, 40)) + 3.0
    where = coordinates(caches, [True, True] + [False] * 7)
    np.testing.assert_allclose(where.frame @ where.frame.T, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(where.anchor, caches[:2].mean(0))
    rebuilt = where.anchor + where.points @ where.frame
    np.testing.assert_allclose(np.linalg.norm(caches - rebuilt, axis=1), where.rest_N, atol=1e-9)
    bounds = distance_bounds(caches, where)
    assert len(bounds) == 36 and all(b.holds for b in bounds.values())
    assert any(b.value < 0.9 * b.bound for b in bounds.values())
    plane = coordinates(where.anchor + where.points @ where.frame, [True, True] + [False] * 7)
    assert plane.rest_N.max() < 1e-8, "points in a plane lose nothing"


def test_a_frame_of_too_few_points_has_zero_directions() -> None:
    caches = np.stack((np.ones(5), 2 * np.ones(5)))
    where = coordinates(caches, [True, False])
    assert np.abs(where.frame[1:]).max() == 0 and where.z_N[1] == pytest.approx(5**0.5)
    with pytest.raises(ValueError, match="initial"):
        coordinates(caches, [False, False])
    with pytest.raises(ValueError, match="anchor"):
        coordinates(np.zeros((2, 5)), [True, False])


def squared_distances(caches: np.ndarray) -> np.ndarray:
    return ((caches[:, None] - caches[None]) ** 2).sum(-1)


def test_dispersion_is_the_mean_over_pairs() -> None:
    caches = np.random.default_rng(1).normal(size=(4, 6))
    pairs = [np.sum((a - b) ** 2) for i, a in enumerate(caches) for j, b in enumerate(caches) if i != j]
    assert dispersion(squared_distances(caches)) == pytest.approx(np.mean(pairs))
    spread = caches - caches.mean(axis=0)  # as App. C.4 has it
    assert dispersion(squared_distances(caches)) == pytest.approx(2 * 4 * (spread**2).sum() / (4 * 3))
    assert dispersion(squared_distances(caches[:1])) == 0


def test_a_sync_contracts_as_the_copied_caches_do() -> None:
    caches = np.random.default_rng(0).normal(size=(4, 6))
    found = sync_contraction(squared_distances(caches), [(2, 0), (2, 3)])
    before, after = (dispersion(squared_distances(some)) for some in (caches, caches[[2, 1, 2, 2]]))
    assert (found.pre, found.post) == (pytest.approx(before), pytest.approx(after))
    assert found.gamma == pytest.approx(after / before)
    assert sync_contraction(np.zeros((3, 3)), [(0, 1)]).gamma is None
