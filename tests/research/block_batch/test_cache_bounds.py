"""Propositions 1 to 3 hold on random numbers and on the caches of a model, and a broken bound is found."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.plain_loops import ContiguousCache, forward_canvas, run_canvas
from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.canvas_decoder import canvas_decoder
from mbd_core.decoding.canvas.plan import CanvasPlan, Query
from research.block_batch.bounds import (
    BlockMovement,
    Bound,
    Drift,
    error_bounds,
    measured_drift,
    projected_energy,
    projected_norm_bound,
)
from research.block_batch.caches import coordinates, distance_bounds


def test_energy_of_a_block_is_its_share_and_the_norm_at_most_its_root() -> None:
    full = np.random.default_rng(2).normal(size=(24, 5)) * np.arange(1, 25)[:, None]
    for size in (1, 4, 12, 24):
        mean, share = projected_energy(full, size)
        assert mean == pytest.approx(share)
        assert projected_norm_bound(full, size).holds
    even = np.ones((24, 5))
    assert projected_norm_bound(even, 4).value == pytest.approx(projected_norm_bound(even, 4).bound), "tight"
    with pytest.raises(ValueError, match="tile"):
        projected_energy(full, 5)


def test_a_bound_that_is_broken_says_so() -> None:
    assert not Bound(1.01, 1.0).holds and Bound(1.0, 1.0).holds
    drift = Drift(growth=0.1, block_noise=0.1, contraction=0.5, refresh_noise=0.0)
    good = error_bounds([1.0, 1.2, 0.6], ["block", "refresh"], drift)
    assert [b.holds for b in good] == [True, True]
    assert [b.holds for b in error_bounds([1.0, 1.3, 0.6], ["block", "refresh"], drift)] == [False, True]


def test_errors_after_block_forwards_grow_as_their_premise_says() -> None:
    drift, error = Drift(growth=0.05, block_noise=0.2, contraction=0.3, refresh_noise=0.1), 7.0
    for step in range(1, 5):
        error = 1.05 * error + 0.2
        assert error == pytest.approx(drift.after_blocks(7.0, step))
    with pytest.raises(ValueError, match="contraction"):
        Drift(growth=0.0, block_noise=0.0, contraction=1.0, refresh_noise=0.0)


def test_the_propositions_hold_on_a_model(tiny_model_dir: Path) -> None:
    """A BlockBatch run's own caches: coordinates, block corrections, and the error between refreshes."""
    model, length = load_model(tiny_model_dir, dtype=torch.float32), 24
    prompt, device = tuple(range(5, 13)), torch.device("cpu")
    settings = Branches(block_lengths=(2, 4, 8), tau_sync=1000, refresh=8)
    decoder = canvas_decoder(
        prompt, length - 8, Canvas(tau=0.9, branches=settings), Sampling(),
        vocab=Vocab(model.config.mask_token_id, model.config.vocab_size), eos_token_ids=(), shift=False,
    )  # fmt: skip

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
                errors.append(float(np.linalg.norm(now - full_refresh(decoder.branches[0].lane.tokens))))
                kinds[0].append("block" if len(q.tokens) < length else "refresh")
        if checked < 2 and len(plan.queries) > 1 and len(plan.queries[0].tokens) < length:
            checked += 1
            now, tokens = cache.positions(0).double().numpy(), decoder.branches[0].lane.tokens.clone()
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

    run_canvas(model, decoder, watch=watch)
    assert checked == 2
    stacked = np.stack(caches)
    where = coordinates(stacked, [True] + [False] * (len(caches) - 1))
    assert all(b.holds for b in distance_bounds(stacked, where).values())
    events = kinds[0][1:]
    drift = measured_drift(errors, events)  # type: ignore[arg-type]
    assert "refresh" in events and drift.refresh_noise < 1e-3 < drift.block_noise
    assert all(b.holds for b in error_bounds(errors, events, drift))  # type: ignore[arg-type]
