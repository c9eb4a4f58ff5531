"""A canvas with one trajectory on a hash model: caches, guidance, forbidden EOS, log-probabilities, seeds."""

import pytest
import torch
from fake_canvas_model import PREDICTED, FakeModel, drive, make

from mbd_core.decoding.blocks.canvas_config import Canvas, Refresh
from mbd_core.decoding.blocks.sampling_config import Sampling


def test_caches_differ_from_none() -> None:
    """Otherwise the equalities of `test_canvas_decoder.py` would show nothing: stale keys change the hash model."""
    runs = [drive(make(Canvas(tau=1.0, block_length=4, cache=cache))).tokens for cache in ("none", "prefix", "dual")]
    stale = drive(make(Canvas(tau=1.0, block_length=4, refresh=Refresh(prompt_interval=7, response_interval=3))))
    assert len({tuple(r) for r in (*runs, stale.tokens)}) == 4


def test_one_token_a_forward_at_tau_one() -> None:
    for cache in ("none", "prefix", "dual"):
        assert drive(make(Canvas(tau=1.0, cache=cache, block_length=5))).num_forwards == 12


def test_guidance_without_a_condition_changes_nothing() -> None:
    """A model blind to the prompt says the same with and without it: un + (w + 1)(cond - un) is cond."""
    plain = drive(make(Canvas(block_length=4, tau=0.5)), FakeModel(blind=3))
    guided = make(Canvas(block_length=4, tau=0.5, cfg_scale=2.0))
    assert guided.num_lanes == 2
    drive(guided, FakeModel(blind=3))
    assert (guided.tokens, guided.num_forwards) == (plain.tokens, plain.num_forwards)
    assert drive(make(Canvas(block_length=4, tau=0.5, cfg_scale=2.0))).tokens != plain.tokens


def test_guidance_combines_the_two_rows() -> None:
    decoder, model = make(Canvas(accept="quota", block_length=1, cfg_scale=0.5), max_tokens=1), FakeModel()
    conditional, unconditional = model.forward(decoder.plan(), decoder.length)
    combined = PREDICTED.exclude_((unconditional + 1.5 * (conditional - unconditional))[0], -torch.inf)
    decoder.update([conditional, unconditional])
    assert decoder.tokens == [int(combined.argmax())]


def test_log_probs_are_those_of_the_accepting_forward() -> None:
    decoder, model, wanted = make(Canvas(block_length=4, tau=0.5)), FakeModel(), {}
    while not decoder.done:
        before, plan = decoder.tokens, decoder.plan()
        logits = model.forward(plan, decoder.length)
        decoder.update(logits)
        rows = dict(zip(plan.queries[0].logits_at.tolist(), logits[0], strict=True))
        for place in range(len(before), len(decoder.tokens)):
            if place + 3 in rows:
                wanted[place] = float(rows[place + 3].log_softmax(-1)[decoder.tokens[place]])
    known = [p for p in wanted if abs(wanted[p] - decoder.log_probs[p]) < 1e-5]
    assert len(known) > 6  # the others were accepted by an earlier forward, behind a mask


def test_forbidding_eos_takes_its_probability_away() -> None:
    eos = (2, 7, 9)
    decoder = drive(make(Canvas(block_length=4, tau=0.5, forbid_eos=True), eos=eos))
    assert len(decoder.tokens) == 12 and not set(decoder.tokens) & set(eos)
    single = make(Canvas(block_length=1, forbid_eos=True), max_tokens=1, eos=eos)
    model = FakeModel()
    row = model.forward(single.plan(), single.length)[0]
    masked = row.clone()
    masked[:, list(eos)] = -torch.inf
    single.update([row])
    assert single.log_probs[0] == pytest.approx(float(masked.log_softmax(-1)[0, single.tokens[0]]), abs=1e-6)
    with pytest.raises(ValueError, match=r"canvas\.forbid_eos"):
        make(Canvas(forbid_eos=True))


def test_a_seed_decides_what_is_drawn() -> None:
    canvas = Canvas(block_length=4, accept="quota", steps=6)
    runs = [drive(make(canvas, sampling=Sampling(temperature=1.5, seed=s))).tokens for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    by_chance = [
        drive(make(Canvas(block_length=None, accept="origin", steps=6), sampling=Sampling(seed=s))).tokens
        for s in (1, 1, 2)
    ]
    assert by_chance[0] == by_chance[1] != by_chance[2]
