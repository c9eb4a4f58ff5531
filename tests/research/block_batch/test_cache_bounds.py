"""Caches as points: their frame and dispersion; Propositions 1 to 3 hold on them, and a broken bound is found."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.canvas_decoder import canvas_decoder
from mbd_core.decoding.canvas.plan import CanvasPlan, Query
from mbd_core.plain_loops import ContiguousCache, forward_canvas, run_planned
from research.block_batch.bounds import (
    BlockMovement,
    BoundedValue,
    Drift,
    error_bounds,
    measured_drift,
    projected_energy,
    projected_norm_bound,
)
from research.block_batch.caches import coordinates, dispersion, distance_bounds, sync_contraction


def test_energy_of_a_block_is_its_share_and_the_norm_at_most_its_root() -> None:
    full = np.random.default_rng(2).normal(size=(24, 5)) * np.arange(1, 25)[:, None]
    for size in (1, 4, 12, 24):
        mean, share = projected_energy(full, size)
        assert mean == pytest.approx(share)
        assert projected_norm_bound(full, size).holds
    even = np.ones((24, 5))
    assert projected_norm_bound(even, 4).value == pytest.approx(projected_norm_bound(even, 4).bound), "tight"
    with pytest.raises(ValueError):
        projected_energy(full, 5)


def test_a_bound_that_is_broken_says_so() -> None:
    assert not BoundedValue(1.01, 1.0).holds and BoundedValue(1.0, 1.0).holds
    drift = Drift(growth=0.1, block_noise=0.1, contraction=0.5, refresh_noise=0.0)
    good = error_bounds([1.0, 1.2, 0.6], ["block", "refresh"], drift)
    assert [b.holds for b in good] == [True, True]
    assert [b.holds for b in error_bounds([1.0, 1.3, 0.6], ["block", "refresh"], drift)] == [False, True]


def test_errors_after_block_forwards_grow_as_their_premise_says() -> None:
    drift, error = Drift(growth=0.05, block_noise=0.2, contraction=0.3, refresh_noise=0.1), 7.0
    for step in range(1, 5):
        error = 1.05 * error + 0.2
        assert error == pytest.approx(drift.after_blocks(7.0, step))
    with pytest.raises(ValueError):
        Drift(growth=0.0, block_noise=0.0, contraction=1.0, refresh_noise=0.0)


def test_the_propositions_hold_on_a_model(tiny_model_dir: Path) -> None:
    """A BlockBatch run's own caches: coordinates, block corrections, and the error between refreshes."""
    model, length = load_model(tiny_model_dir, dtype=torch.float32), 24
    prompt, device = tuple(range(5, 13)), torch.device("cpu")
    settings = Branches(block_lengths=(2, 4, 8), tau_sync=1000, refresh=8)
    decoder = canvas_decoder(
        prompt,
        length - 8,
        Canvas(tau=0.9, branches=settings),
        Sampling(),
        vocab=Vocab(model.config.mask_token_id, model.config.vocab_size),
        eos_token_ids=(),
        shift=False,
    )

    def full_refresh(tokens: torch.Tensor) -> np.ndarray:
        fresh = ContiguousCache(model, num_lanes=1, length=length)
        forward_canvas(model, fresh, [Query(0, 0, length, tokens, torch.tensor([0]))], device)
        return fresh.positions(0).double().numpy()

    caches: list[np.ndarray] = []
    kinds: dict[int, list[str]] = {0: []}
    errors: list[float] = []
    checked = 0

    def watch(plan: CanvasPlan, cache: ContiguousCache) -> None:
        nonlocal checked
        for q in plan.queries:
            caches.append(cache.positions(q.lane).double().numpy().ravel())
            if q.lane == 0:
                now = cache.positions(0).double().numpy()
                errors.append(
                    float(np.linalg.norm(now - full_refresh(torch.from_numpy(decoder.branches[0].lane.tokens))))
                )
                kinds[0].append("block" if len(q.tokens) < length else "refresh")
        if checked < 2 and len(plan.queries) > 1 and len(plan.queries[0].tokens) < length:
            checked += 1
            now, tokens = cache.positions(0).double().numpy(), torch.tensor(decoder.branches[0].lane.tokens)
            tokens[8 + checked :] = 17  # a step further on, so that there is something to correct
            updates = []
            for start in range(0, length, 4):
                copy = ContiguousCache(model, num_lanes=1, length=length)
                copy.k[:, 0], copy.v[:, 0] = cache.k[:, 0], cache.v[:, 0]
                row = Query(0, start, start + 4, tokens[start : start + 4], torch.tensor([start]))
                forward_canvas(model, copy, [row], device)
                updates.append((start, copy.positions(0).double().numpy() - now))
            full, residuals = full_refresh(tokens) - now, []
            for start, moved in updates:
                outside = np.delete(moved, slice(start, start + 4), axis=0)
                assert not outside.any() and moved.any(), "a block forward moves its block alone"
                residuals.append(np.linalg.norm((moved - full)[start : start + 4]))
            movement = BlockMovement(
                share=4 / length,
                full=float(np.linalg.norm(full)),
                moved=float(np.mean([np.linalg.norm(moved) for _, moved in updates])),
                residual=float(np.mean(residuals)),
            )
            assert movement.bound.holds
            assert projected_norm_bound(full, 4).holds

    run_planned(model, decoder, watch=watch)
    assert checked == 2
    stacked = np.stack(caches)
    where = coordinates(stacked, [True] + [False] * (len(caches) - 1))
    assert all(b.holds for b in distance_bounds(stacked, where).values())
    events = kinds[0][1:]
    drift = measured_drift(errors, events)  # type: ignore[arg-type]
    assert "refresh" in events and drift.refresh_noise < 1e-3 < drift.block_noise
    assert all(b.holds for b in error_bounds(errors, events, drift))  # type: ignore[arg-type]


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
