"""Canvas decoding on a hash model: it ends, fills exactly, predicts nothing forbidden, and its equalities hold."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from fake_canvas_model import MASK, TAIL, FakeModel, drive, make
from hypothesis import given, settings
from hypothesis import strategies as st

from mbd_core.decoding.blocks.canvas_config import Branches, Canvas, Leap, MultiBlock, Refresh
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.branches import BranchedCanvas
from mbd_core.decoding.canvas.lane import Lane, num_lanes

LENGTHS = st.sampled_from([None, 1, 3, 4, 8, 40])
CACHES = st.sampled_from(["none", "prefix", "dual"])


@st.composite
def canvases(draw: st.DrawFn, max_tokens: int) -> Canvas:
    """Any method there is."""
    kind = draw(
        st.sampled_from(
            ["quota", "schedule", "origin", "threshold", "factor", "candidates", "leap", "branches", "multi_block"]
        )
    )
    if kind == "branches":
        lengths = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), min_size=1, max_size=4, unique=True))
        return Canvas(
            tau=draw(st.sampled_from([0.3, 0.7, 1.0])),
            branches=Branches(
                block_lengths=tuple(sorted(lengths)),
                tau_merge=draw(st.sampled_from([0.05, 0.3, 1.0])),
                tau_sync=draw(st.sampled_from([0, 2, 1000])),
                refresh=draw(st.sampled_from([1, 4, 1000])),
            ),
        )
    if kind == "multi_block":
        delay = draw(st.sampled_from([None, 0, 1, 3]))
        return Canvas(
            block_length=draw(LENGTHS),
            multi_block=MultiBlock(
                tau_entropy=draw(st.sampled_from([0.0, 1.0, 2.5])),
                tau_add=draw(st.sampled_from([0.0, 0.1, 1.0])),
                tau_active=draw(st.sampled_from([0.0, 0.5, 1.0])),
                cache_delay=delay,
                refresh=None if delay is None else draw(st.sampled_from([None, 1, 3])),
                rule=draw(st.sampled_from([None, "llada", "dream"])),
            ),
        )
    refresh = draw(
        st.none() | st.builds(Refresh, prompt_interval=st.integers(1, 9), response_interval=st.integers(1, 4))
    )
    length = draw(LENGTHS)
    if refresh and length is None:
        refresh = dataclasses.replace(refresh, response_interval=1)
    shared: dict[str, Any] = {
        "block_length": length,
        "cache": "none" if refresh else draw(CACHES),
        "refresh": refresh,
        "cfg_scale": draw(st.sampled_from([0.0, 1.5])),
    }
    blocks = -(-max_tokens // (length or max_tokens))
    steps = draw(st.integers(blocks, max_tokens)) if max_tokens % (length or max_tokens) == 0 else max_tokens
    tau = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    score = draw(st.sampled_from(["confidence", "margin", "neg_entropy", "random"]))
    match kind:
        case "quota" | "schedule":
            heat = 0.0 if score == "random" else draw(st.sampled_from([0.0, 0.5]))
            return Canvas(accept=kind, steps=steps, score=score, score_temperature=heat, **shared)
        case "origin":
            return Canvas(accept="origin", steps=steps, **shared)
        case "factor":
            return Canvas(accept="factor", factor=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])), **shared)
        case "candidates":
            return Canvas(steps=steps, tau=tau, score=score, **shared)
        case "leap":
            return Canvas(tau=tau, leap=Leap(tau_relaxed=tau / 2, radius=2), **shared)
    return Canvas(tau=tau, score=score, **shared)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Canvas, dict[str, Any], int]:
    max_tokens = draw(st.integers(1, 16))
    rest = {
        "max_tokens": max_tokens,
        "prompt": tuple(draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))),
        "shift": draw(st.booleans()),
        "sampling": Sampling(temperature=draw(st.sampled_from([0.0, 1.0])), seed=draw(st.integers(0, 99))),
    }
    return draw(canvases(max_tokens)), rest, draw(st.integers(0, 10_000))


@settings(max_examples=150, derandomize=True)
@given(problems())
def test_every_method_ends_and_fills_exactly(problem: tuple[Canvas, dict[str, Any], int]) -> None:
    canvas, rest, seed = problem
    decoder = drive(make(canvas, **rest), FakeModel(seed))
    assert len(decoder.tokens) == len(decoder.log_probs) == rest["max_tokens"]
    assert not set(decoder.tokens) & {MASK, TAIL}
    assert all(p <= 0 and math.isfinite(p) for p in decoder.log_probs)
    if canvas.accept == "schedule":
        assert decoder.num_forwards == canvas.steps
    elif canvas.branches is None:  # a forward of an `origin` step may fill nothing, but there are only so many steps
        assert decoder.num_forwards <= rest["max_tokens"]


@settings(max_examples=60, derandomize=True)
@given(problems())
def test_a_token_s_step_is_the_forward_that_accepted_it(problem: tuple[Canvas, dict[str, Any], int]) -> None:
    canvas, rest, seed = problem
    model, decoder, begin = FakeModel(seed), make(canvas, **rest), len(rest["prompt"])

    def lanes() -> list[Lane]:
        return [b.lane for b in decoder.branches] if isinstance(decoder, BranchedCanvas) else [decoder._lane]

    accepted = set()
    while not decoder.done:
        before = [lane.copy() for lane in lanes()]
        decoder.update(model.forward(decoder.plan(), decoder.length))
        for old, new in zip(before, lanes(), strict=True):
            written = ~new.masked & (old.masked | (old.tokens != new.tokens))  # a sync overwrites
            places = np.flatnonzero(written).tolist()
            accepted |= {(decoder.num_forwards, place - begin, int(new.tokens[place])) for place in places}
    steps = set(zip(decoder.steps, range(rest["max_tokens"]), decoder.tokens, strict=True))
    assert steps <= accepted if canvas.branches else steps == accepted


@settings(max_examples=60, derandomize=True)
@given(problems())
def test_planning_changes_nothing_and_a_replay_is_the_same(problem: tuple[Canvas, dict[str, Any], int]) -> None:
    canvas, rest, seed = problem
    once = drive(make(canvas, **rest), FakeModel(seed))
    model, again = FakeModel(seed), make(canvas, **rest)
    while not again.done:
        again.plan()
        first, plan = again.plan(), again.plan()
        assert first.copies == plan.copies
        for a, b in zip(first.queries, plan.queries, strict=True):
            assert (a.lane, a.start, a.stop) == (b.lane, b.start, b.stop) and torch.equal(a.tokens, b.tokens)
        again.update(model.forward(plan, again.length))
    assert (again.tokens, again.log_probs, again.num_forwards) == (once.tokens, once.log_probs, once.num_forwards)


@settings(max_examples=60, derandomize=True)
@given(problems(), st.sets(st.integers(1, 12), min_size=1, max_size=3))
def test_an_eos_only_cuts(problem: tuple[Canvas, dict[str, Any], int], eos: set[int]) -> None:
    canvas, rest, seed = problem
    ends = make(canvas, eos=tuple(eos), **rest)
    drive(ends, FakeModel(seed))
    if canvas.branches or canvas.multi_block:  # another branch may win; earlier blocks see the EOS behind them
        assert not set(ends.tokens[:-1]) & eos
        return
    full = drive(make(canvas, **rest), FakeModel(seed))
    stop = next((i + 1 for i, t in enumerate(full.tokens) if t in eos), len(full.tokens))
    assert ends.tokens == full.tokens[:stop] and ends.log_probs == full.log_probs[:stop]
    length = canvas.block_length or rest["max_tokens"]
    if -(-stop // length) * length < rest["max_tokens"]:
        assert ends.num_forwards < full.num_forwards, "blocks behind the EOS cost something"


SAME = [
    (
        Canvas(tau=0.5, refresh=Refresh(prompt_interval=1, response_interval=1), block_length=4),
        Canvas(tau=0.5, block_length=4),
    ),
    (Canvas(tau=0.6, leap=Leap(tau_relaxed=0.6), block_length=4), Canvas(tau=0.6, block_length=4)),
    (Canvas(block_length=None, tau=0.6), Canvas(block_length=50, tau=0.6)),
    (Canvas(block_length=None, cache="dual"), Canvas(block_length=None, cache="prefix")),
    (Canvas(tau=1.0, block_length=4), Canvas(accept="quota", block_length=4)),
    (Canvas(accept="factor", factor=0.0, block_length=4), Canvas(accept="quota", block_length=4)),
    (Canvas(accept="schedule", steps=1, block_length=None), Canvas(tau=0.0, block_length=None)),
    (Canvas(tau=0.6, block_length=None, steps=1), Canvas(tau=0.6, block_length=None)),
    *(
        (
            Canvas(tau=0.5, branches=Branches(block_lengths=(n,), refresh=n)),
            Canvas(tau=0.5, block_length=n, cache="dual"),
        )
        for n in (1, 3, 5, 13)
    ),
]


@pytest.mark.parametrize(("one", "other"), SAME)
@pytest.mark.parametrize("shift", [False, True])
def test_two_settings_that_mean_the_same(one: Canvas, other: Canvas, shift: bool) -> None:
    for seed in range(4):
        a = drive(make(one, max_tokens=13, shift=shift), FakeModel(seed))
        b = drive(make(other, max_tokens=13, shift=shift), FakeModel(seed))
        assert (a.tokens, a.log_probs, a.num_forwards) == (b.tokens, b.log_probs, b.num_forwards)


@settings(max_examples=40, derandomize=True)
@given(problems())
def test_updates_tell_what_was_filled(problem: tuple[Canvas, dict[str, Any], int]) -> None:
    """Masks accepted, less those a sync put back, are the tokens there are; ratios are what the forward saw."""
    canvas, rest, seed = problem
    decoder, model, filled = make(canvas, **rest), FakeModel(seed), 0
    while not decoder.done:
        update = decoder.update(model.forward(decoder.plan(), decoder.length))
        assert update.mask_ratio.keys() == update.accepted.keys()
        assert all(0 < ratio <= 1 for ratio in update.mask_ratio.values())
        filled += sum(update.accepted.values())
        assert canvas.branches or not update.edited
        if canvas.branches is None:
            (ratio,) = update.mask_ratio.values()
            assert decoder.num_forwards > 1 or ratio == 1
    if canvas.branches is None:
        assert filled == rest["max_tokens"]
    elif canvas.branches.tau_sync == 1000:
        assert filled == rest["max_tokens"] * decoder.num_lanes
    assert decoder.num_lanes == num_lanes(canvas, rest["max_tokens"])
