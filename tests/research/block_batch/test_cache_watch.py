"""What a watch keeps of caches is what the caches are: sketches, dispersions, copies."""

from pathlib import Path

import numpy as np
import pytest
import torch
from full_attention_folder import MAX_TOKENS, decoder_of, make_folder

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas
from mbd_core.decoding.canvas.branches import BranchedCanvas
from mbd_core.decoding.canvas.plan import CanvasPlan
from mbd_core.plain_loops import ContiguousCache, run_planned
from research.block_batch.cache_watch import BranchWatch, Sketch
from research.block_batch.caches import dispersion

LENGTHS, TAU = (4, 8, 16), 0.6
BRANCHES = {"tau_sync": 2, "refresh": 16}
PROMPTS = [[5, 9, 14, 33, 21, 8, 77], [3, 40, 7, 7, 19], [61, 2, 30]]


@pytest.fixture(scope="module", params=["llada", "dream"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(family, tmp_path_factory.mktemp("models") / family)


def test_a_branch_watch_sees_every_copy(folder: Path) -> None:
    """Its sketches, kept part by part through windows and syncs, are those of the caches; its D_t is theirs."""
    model = load_model(folder, dtype=torch.float32)
    settings = Branches(block_lengths=LENGTHS, **BRANCHES)
    decoder = decoder_of(model, PROMPTS[0], Canvas(tau=TAU, branches=settings))
    assert isinstance(decoder, BranchedCanvas)
    sketch = Sketch(model, length=decoder.length)
    watch = BranchWatch(sketch, decoder)
    copied = 0

    def check(plan: CanvasPlan, cache: ContiguousCache) -> None:
        nonlocal copied
        watch(plan, cache)
        copied += len(plan.copies) if decoder.num_forwards > 1 else 0
        last = {event.branch: event for event in watch.run.events}
        for q in plan.queries if decoder.num_forwards else []:
            fresh = sketch.positions(cache, q.lane, 0, decoder.length).double().sum(0).numpy()
            np.testing.assert_allclose(last[LENGTHS[q.lane]].sketch, fresh, atol=1e-3)
        running = [i for i, b in enumerate(decoder.stats()) if b.num_filled < MAX_TOKENS]
        if decoder.num_forwards and len(running) > 1:
            flat = np.stack([cache.positions(i).double().numpy().ravel() for i in running])
            squared = ((flat[:, None] - flat[None]) ** 2).sum(-1)
            assert watch.run.dispersions[-1] == (decoder.num_forwards, pytest.approx(dispersion(squared), rel=1e-5))

    run_planned(model, decoder, watch=check)
    assert copied > 0 and len(watch.run.syncs) > 0
    assert sum(len(s.overwritten) for s in watch.run.syncs) >= copied


def test_a_sketch_keeps_distances_and_its_seed(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32)
    ratios = []
    for seed in range(8):
        one, other = (ContiguousCache(model, num_lanes=1, length=6) for _ in range(2))
        generator = torch.Generator().manual_seed(seed)
        for cache in (one, other):
            cache.k.normal_(generator=generator)
            cache.v.normal_(generator=generator)
        sketch = Sketch(model, length=6, seed=seed)
        apart = (sketch.positions(one, 0, 0, 6) - sketch.positions(other, 0, 0, 6)).sum(0)
        ratios.append(float(apart.square().sum() / (one.positions(0) - other.positions(0)).square().sum()))
        again = Sketch(model, length=6, seed=seed).positions(one, 0, 2, 4)
        assert torch.equal(again, sketch.positions(one, 0, 2, 4))
    assert abs(np.mean(ratios) - 1) < 0.1 and max(abs(np.array(ratios) - 1)) < 0.4
