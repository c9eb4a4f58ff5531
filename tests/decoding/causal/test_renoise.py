"""Renoising: what is accepted, when a canvas ends, where draws come from, and how many logits are held at once."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mbd_core.decoding.blocks.causal_config import Renoise
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.causal import renoise
from mbd_core.decoding.causal.renoise import (
    CanvasReading,
    PositionNoise,
    RenoisingDecoder,
    accept_within,
    piece_length,
    read_canvas,
    temperature,
)
from mbd_core.models.model_config import NO_MASK

L, V = 8, 40


@settings(max_examples=60)
@given(
    entropies=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=9),
    bound=st.sampled_from([0.0, 0.5, 1.25, 9.0]),
)
def test_positions_are_accepted_while_those_before_are_within_the_bound(entropies: list[float], bound: float) -> None:
    """In the order of entropy, the first of equals first; sums of these numbers are exact."""
    accepted, total = set(), 0.0
    for place in sorted(range(len(entropies)), key=lambda i: (entropies[i], i)):
        if total <= bound:
            accepted.add(place)
        total += entropies[place]
    found = accept_within(torch.tensor(entropies), bound)
    assert set(found.nonzero()[:, 0].tolist()) == accepted and accepted


def test_temperature_falls_from_the_greatest_and_never_reaches_the_least() -> None:
    rule = Renoise(steps=4, t_max=0.8, t_min=0.4)
    assert [temperature(rule, step) for step in range(4)] == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert temperature(Renoise(steps=1, t_max=0.8, t_min=0.4), 0) == 0.8


def test_noise_belongs_to_seed_position_and_step() -> None:
    positions = torch.arange(4000)
    fresh = PositionNoise(3, V).fresh(positions, 2)
    assert fresh.min() == 0 and fresh.max() == V - 1
    assert (torch.bincount(fresh, minlength=V) - 100).abs().max() < 45  # uniform: 4.5 standard deviations
    assert torch.equal(fresh[7:19], PositionNoise(3, V).fresh(positions[7:19], 2))
    log_p = torch.randn(4000, V, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    drawn = PositionNoise(3, V).drawn(log_p, positions, 2)
    assert torch.equal(drawn[7:19], PositionNoise(3, V).drawn(log_p[7:19], positions[7:19], 2))
    for other in (PositionNoise(4, V), PositionNoise(3, V)):
        step = 2 if other.seed == 4 else 3
        assert (other.fresh(positions, step) == fresh).float().mean() < 0.1
        assert (other.drawn(log_p, positions, step) == drawn).float().mean() < 0.3
    likelier = (drawn == log_p.argmax(-1)).float().mean()
    assert likelier == pytest.approx(float(log_p.amax(-1).exp().mean()), abs=0.03)


def reading_of(logits_LV: Tensor, length: int | None, size: int = V) -> CanvasReading:
    """Of a canvas at positions 5 to 5 + L, with one-hot embeddings."""
    return read_canvas(
        lambda part: logits_LV[part],
        torch.arange(5, 5 + len(logits_LV)),
        temperature=0.5,
        step=1,
        noise=PositionNoise(3, size),
        vocab=Vocab(NO_MASK, size),
        expect=lambda p: p.clone(),
        length=length,
    )


def test_pieces_are_the_whole_and_their_formulas() -> None:
    logits = torch.randn(L, V, generator=torch.Generator().manual_seed(1)) * 3
    whole, before = reading_of(logits, None), logits.clone()
    for length in (1, 3, L):
        for part, wanted in zip(vars(reading_of(logits, length)).values(), vars(whole).values(), strict=True):
            torch.testing.assert_close(part, wanted)
    assert torch.equal(logits, before)
    p = (logits / 0.5).softmax(-1)
    torch.testing.assert_close(whole.expected_LD, p)
    torch.testing.assert_close(whole.entropy_L, -(p * p.log()).sum(-1), rtol=1e-4, atol=1e-5)
    assert torch.equal(whole.best_L, logits.argmax(-1))
    torch.testing.assert_close(whole.log_p_L, logits.log_softmax(-1).amax(-1))


def test_padding_of_the_vocabulary_is_never_taken() -> None:
    logits = torch.zeros(200, V)
    logits[:, 30:] = 9.0
    reading = reading_of(logits, None, size=30)
    assert reading.best_L.max() < 30 and reading.drawn_L.max() < 30
    assert reading.expected_LD[:, 30:].abs().max() == 0 and bool(reading.entropy_L.isfinite().all())


class Held(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made under it; views hold nothing of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            given_storages = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given_storages:
                size = tensor.untyped_storage().nbytes()
                self.now += size
                self.most, self.largest = max(self.most, self.now), max(self.largest, size)
                weakref.finalize(tensor, self._free, size)
        return out

    def _free(self, size: int) -> None:
        self.now -= size


def test_logits_are_held_in_pieces_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canvas of 256 positions over 4,096 ids is 4 MiB of logits; with a budget of 1 MiB for all copies a piece has
    6 positions."""
    size, length = 4096, 256
    monkeypatch.setattr(renoise, "PIECE_BYTES", 2**20)
    assert piece_length(size) == 2**20 // (4 * renoise.COPIES * size) == 6
    table = torch.randn(size, 4)
    hidden = torch.randn(length, 4, generator=torch.Generator().manual_seed(2))
    held = Held()
    with torch.inference_mode(), held:
        read_canvas(
            lambda part: hidden[part] @ table.T,
            torch.arange(length),
            temperature=0.5,
            step=1,
            noise=PositionNoise(3, size),
            vocab=Vocab(NO_MASK, size),
            expect=lambda p: p @ table,
        )
    assert held.largest <= 8 * 6 * size  # the noise of one piece, in 64-bit integers
    assert 2**18 < held.most <= 2**20 < 4 * length * size


def decoder(rule: Renoise, *, max_tokens: int = 2 * L, **changes: Any) -> RenoisingDecoder:
    request = Request(
        request_id="a",
        prompt=(1, 2, 3),
        max_tokens=max_tokens,
        decoding=DecodingConfig(block_size=L, renoise=rule),
        **changes,
    )
    return RenoisingDecoder(request, eos_token_ids=(0,), vocab=Vocab(NO_MASK, V))


def said(best: int | list[int], entropy: float = 0.0) -> CanvasReading:
    tokens = torch.tensor([best] * L if isinstance(best, int) else best)
    return CanvasReading(tokens + 1, tokens, torch.full((L,), entropy), torch.zeros(L), torch.zeros(L, 2))


@pytest.mark.parametrize(
    ("stability", "bests", "changed"), [(0, [5], 1), (1, [5, 6, 6], 2), (2, [5, 6, 6, 6], 2), (2, [5, 5, 6, 6], 3)]
)
def test_a_canvas_ends_when_its_likeliest_tokens_stay(stability: int, bests: list[int], changed: int) -> None:
    """The last of these needs all four steps. A token's step is the one that changed it last."""
    run = decoder(Renoise(steps=4, stability=stability, tau_entropy=0.1))
    for best in bests:
        assert not run.tokens
        run.take(said(best))
    assert run.tokens == [bests[-1]] * L and run.num_forwards == len(bests) and not run.done
    assert run.steps == [changed] * L


def test_an_unsure_canvas_takes_all_steps() -> None:
    run = decoder(Renoise(steps=3, tau_entropy=0.1))
    for number in range(3):
        assert len(run.tokens) == 0, number
        run.take(said(5, entropy=0.1))  # the mean must be below
    assert run.tokens == [5] * L


def test_the_answer_is_the_last_argmax_and_canvases_are_renoised() -> None:
    run = decoder(Renoise(steps=2, entropy_bound=0.5, tau_entropy=0.0))
    first = run.canvas_L.clone()
    entropy, zeros = torch.tensor([0.5, 0.0, 0.25] + [3.0] * 5), torch.zeros(L)
    reading = CanvasReading(torch.full((L,), 9), torch.full((L,), 5), entropy, zeros, torch.ones(L, 2))
    update = run.take(reading)
    assert update.accepted == {(0, 0): 3} and update.mask_ratio == {(0, 0): 1.0}
    assert run.canvas_L[:3].tolist() == [9, 9, 9]
    assert torch.equal(run.canvas_L[3:], PositionNoise(0, V).fresh(torch.arange(3, 3 + L), 0)[3:])
    assert not torch.equal(run.canvas_L[3:], first[3:]) and run.expected_LD is reading.expected_LD
    assert run.take(said(7)).mask_ratio == {(0, 0): 1 - 3 / L}
    assert run.tokens == [7] * L  # nothing that was drawn
    store, canvas = run.plan().queries
    assert (store.start, store.stop, store.causal, store.num_keys, len(store.logits_at)) == (3, 3 + L, True, 3 + L, 0)
    assert (canvas.start, canvas.stop, canvas.causal, canvas.denoises) == (3 + L, 3 + 2 * L, False, True)
    assert canvas.expected is None and run.num_stored == 3
    run.take(said(7))
    assert run.num_stored == 3 + L and len(run.plan().queries) == 1


def test_an_answer_ends_at_its_budget_or_its_eos() -> None:
    run = decoder(Renoise(steps=1), max_tokens=L + 3)
    run.take(said(5))
    run.take(said(6))
    assert run.done and run.tokens == [5] * L + [6] * 3
    run = decoder(Renoise(steps=1))
    run.take(said([5, 5, 0, 5, 0, 5, 5, 5]))
    assert run.done and run.tokens == [5, 5, 0]
    run = decoder(Renoise(steps=1), ignore_eos=True, stop_token_ids=(7,))
    run.take(said([5, 0, 0, 5, 7, 5, 5, 5]))
    assert run.done and run.tokens == [5, 0, 0, 5, 7]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"renoise": {"t_min": 0.9}}, r"renoise.t_min=0.9 exceeds renoise.t_max=0.8"),
        ({"renoise": {"t_min": 0.0}}, r"t_min"),
        ({"renoise": {}, "buffer_size": 2}, r"buffer_size=2 has no meaning with renoise"),
        ({"renoise": {}, "tau_m2t": 0.5}, r"tau_m2t=0.5 has no meaning with renoise"),
        (
            {"renoise": {}, "causal": {}},
            r"renoise has no meaning with causal",
        ),
    ],
)
def test_a_setting_without_meaning_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoding_config({}, fields, block_size=L)


def test_a_request_may_change_a_models_own_renoising() -> None:
    own = {"renoise": {"steps": 9}}
    assert decoding_config(own, {}, block_size=L).renoise == Renoise(steps=9)
    assert decoding_config(own, {"renoise": {"steps": 3}}, block_size=L).renoise == Renoise(steps=3)
    assert decoding_config(own, {"tau_m2t": 0.5}, block_size=L).renoise is None
