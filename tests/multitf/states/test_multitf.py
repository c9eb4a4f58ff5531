"""MultiTF's training states: layouts, noise, the mask against its equations, packed layouts against separate ones."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.data.example import IGNORE, Example, encode_example
from mbd_core.multitf.states.batch import MultiTFBatch, collate
from mbd_core.multitf.states.layout import (
    GroupLayout,
    StateConfig,
    layout_set,
    random_layout,
    single_block_layout,
    systematic_layouts,
)
from mbd_core.multitf.states.mask import dual_stream_mask
from mbd_core.multitf.states.noise import NoiseBounds, chain_uniform, num_masked, sorted_uniform
from mbd_core.multitf.states.sample import build_batch, choose_layouts, corrupt, lay_out, self_denoised, without_unseen
from mbd_core.multitf.step.loss import denominator, multitf_loss

MASK, EOS, B = 0, 1, 4


@given(st.integers(1, 30), st.integers(2, 6))
def test_systematic_layouts_cover_every_running_set_once(num_blocks: int, max_group: int) -> None:
    """App. A: for each g, every run of g blocks is one noise-group in exactly one of the g shifted layouts."""
    layouts = systematic_layouts(num_blocks, max_group)
    assert len(layouts) == (max_group + 2) * (max_group - 1) // 2
    assert all(layout.num_blocks == num_blocks for layout in layouts)
    start = 0
    for g in range(2, max_group + 1):
        of_g = layouts[start : start + g]
        start += g
        for first in range(num_blocks - g + 1):
            holding = [lay for lay in of_g if first in (f := lay.first_blocks()) and f.count(first) == g]
            assert len(holding) == 1
            assert holding[0] is of_g[first % g]


@given(st.integers(1, 30), st.integers(2, 6), st.integers(0, 1000))
def test_random_layouts_cover_all_blocks(num_blocks: int, max_group: int, seed: int) -> None:
    layout = random_layout(num_blocks, max_group, random.Random(seed))
    assert layout.num_blocks == num_blocks
    assert all(2 <= size <= max_group for size in layout.sizes[:-1]) and 1 <= layout.sizes[-1] <= max_group


def test_layout_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match=r"sizes=\(2, 0\)"):
        GroupLayout((2, 0))
    with pytest.raises(ValueError, match="num_blocks=0"):
        systematic_layouts(0, 2)
    with pytest.raises(ValueError, match="max_group=1"):
        random_layout(3, 1, random.Random(0))
    assert layout_set(3, max_group=1, num_random=2, rng=random.Random(0)) == [single_block_layout(3)]


@given(st.integers(1, 6), st.integers(0, 10**6))
def test_chain_uniform_rises_within_its_bounds(size: int, seed: int) -> None:
    bounds = NoiseBounds(t_low=0.1, t_high=0.9, margin=0.25)
    assert bounds.t_eff == pytest.approx(0.7)
    ratios = chain_uniform(size, bounds, random.Random(seed))
    assert len(ratios) == size and ratios[0] >= 0.1 and ratios[-1] <= bounds.t_eff
    assert all(a <= b for a, b in pairwise(ratios))
    assert all(a <= b for a, b in pairwise(sorted_uniform(size, bounds, random.Random(seed))))


def test_chain_uniform_means_follow_from_the_equation() -> None:
    """E[t_i] halves the distance to t_eff at every draw from the floor on (Eq. B.4): 1 - 2^-(i+1) of the range."""
    rng, bounds = random.Random(0), NoiseBounds()
    draws = [chain_uniform(4, bounds, rng) for _ in range(20_000)]
    for slot in range(4):
        mean = sum(d[slot] for d in draws) / len(draws)
        expected = bounds.t_eff - (bounds.t_eff - bounds.t_low) * 2.0 ** -(slot + 2)
        assert mean == pytest.approx(expected, abs=0.006)


def test_rounding_says_whether_a_whole_block_is_ever_masked() -> None:
    bounds = NoiseBounds()
    assert num_masked(bounds.t_eff, B, "floor") == B - 1
    assert num_masked(bounds.t_eff, B, "ceil") == B
    assert num_masked(0.001, B, "floor") == 0


def equations(layout: GroupLayout, size: int) -> torch.Tensor:
    """Eqs. B.6 to B.9 written out entry by entry for `[x_t ; x_0]`."""
    length = layout.num_blocks * size
    group = [n for n, g in enumerate(layout.sizes) for _ in range(g)]
    alpha = layout.first_blocks()
    mask = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
    for i in range(2 * length):
        for j in range(2 * length):
            noisy_i, noisy_j = i < length, j < length
            bi, bj = i % length // size, j % length // size
            if noisy_i and noisy_j:
                mask[i, j] = group[bi] == group[bj] and bj <= bi  # B.7
            elif noisy_i:
                mask[i, j] = bj < alpha[bi]  # B.8
            elif not noisy_j:
                mask[i, j] = bj <= bi  # B.9
    return mask


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_mask_is_its_equations(sizes: list[int], size: int) -> None:
    layout = GroupLayout(tuple(sizes))
    blocks = torch.arange(layout.num_blocks).repeat_interleave(size)
    alpha = torch.tensor(layout.first_blocks()).repeat_interleave(size)
    mask = dual_stream_mask(
        torch.cat((torch.ones_like(blocks), torch.zeros_like(blocks))),
        torch.cat((blocks, blocks)),
        torch.cat((alpha, blocks + 1)),
    )
    assert torch.equal(mask, equations(layout, size))


@pytest.fixture(scope="module")
def model() -> Decoder:
    config = ModelConfig(
        architecture="SDARForCausalLM",
        vocab_size=30,
        hidden_size=24,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        max_positions=128,
        tie_word_embeddings=True,
        mask_token_id=MASK,
        eos_token_ids=(EOS,),
        block_size=B,
    )
    model = Decoder(config)
    init_weights(model, seed=1, std=0.2)
    return model.double()


def example(prompt: int, response: int):
    rng = random.Random(prompt * 100 + response)
    draw = [rng.randrange(2, 30) for _ in range(prompt + response)]
    example = encode_example(draw[:prompt], draw[prompt:], eos_token_id=EOS, block_size=B, max_length=64)
    assert example is not None
    return example


@pytest.mark.parametrize("span", ["content", "response"])
@pytest.mark.parametrize("weighting", ["masked_mean", "block_ratio"])
def test_layouts_sharing_a_clean_stream_are_the_separate_sequences(model: Decoder, span, weighting) -> None:
    """[x_t^1; ...; x_t^n; x_0] in one sequence: loss and gradients of n sequences [x_t^i; x_0]."""
    config = StateConfig(block_size=B, max_group=3, num_random=2, span=span, weighting=weighting)
    one, rng = example(6, 17), random.Random(3)
    first_block = 1 if span == "response" else 0
    streams = [
        (layout, corrupt(one, layout, start=first_block * B, config=config, mask_token_id=MASK, rng=rng))
        for layout in choose_layouts(len(one.tokens) // B - first_block, config, rng)
    ]
    assert len(streams) == 7

    loss, _ = multitf_loss(model, collate([lay_out(one, streams, config, first_block=first_block)]))
    loss.backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = 0.0
    for stream in streams:
        alone, _ = multitf_loss(model, collate([lay_out(one, [stream], config, first_block=first_block)]))
        (alone / len(streams)).backward()
        total += float(alone.detach()) / len(streams)
    assert float(loss.detach()) == pytest.approx(total, rel=1e-6)
    for a, b in zip(together, (p.grad for p in model.parameters()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)  # norms and rotations are float32
    model.zero_grad()


@pytest.mark.parametrize("kind", ["systematic", "one_group", "teacher forcing"])
@pytest.mark.parametrize("shift", [False, True])
def test_clean_blocks_that_no_noisy_token_sees_are_not_needed(model: Decoder, kind: str, shift: bool) -> None:
    """Loss and gradients are those of the whole clean stream; what is left out is the last noise-group's, in all
    layouts."""
    states = {
        "systematic": StateConfig(block_size=B, max_group=3, num_random=2),
        "one_group": StateConfig(block_size=B, layouts="one_group", span="response"),
        "teacher forcing": StateConfig(block_size=B, num_layouts=2, labels="answer", self_denoising="both"),
    }
    config, one, rng = states[kind], example(6, 17), random.Random(3)
    first_block = 1 if config.span == "response" else 0
    streams = [
        (layout, corrupt(one, layout, start=first_block * B, config=config, mask_token_id=MASK, rng=rng))
        for layout in choose_layouts(len(one.tokens) // B - first_block, config, rng)
    ]
    whole = lay_out(one, self_denoised(streams, config, rng), config, first_block=first_block, shift=shift)
    needed = without_unseen(whole)
    left_out = (len(whole["stream"]) - len(needed["stream"])) // B
    assert left_out == {"systematic": 1, "one_group": 5, "teacher forcing": 1}[kind]
    found = []
    for row in (whole, needed):
        loss, _ = multitf_loss(model, collate([row]))
        loss.backward()
        found.append((float(loss.detach()), [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6) and found[0][0] > 0.1
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert float((a - b).abs().max()) <= 1e-6 * max(1e-3, float(a.abs().max()))


def test_padding_changes_nothing(model: Decoder) -> None:
    """A short sample beside a long one gives the loss it gives alone (packed == separate)."""
    config = StateConfig(block_size=B, max_group=2)
    examples = [example(3, 5), example(9, 30)]
    both = build_batch(examples, config, mask_token_id=MASK, rngs=[random.Random(5), random.Random(6)])
    with torch.no_grad():
        together, _ = multitf_loss(model, both)
        parts = []
        for row in range(2):
            length = int((both.stream[row] >= 0).sum())
            alone = MultiTFBatch(*(t[row : row + 1, :length] for t in vars(both).values()))
            parts.append(multitf_loss(model, alone)[0])
    torch.testing.assert_close(together, sum(parts) / 2)


@settings(max_examples=60)
@given(
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 4), st.integers(0, 99), st.sampled_from(["floor", "ceil"])
)
def test_only_response_tokens_are_masked_and_weights_sum_to_one(prompt, response, max_group, seed, rounding) -> None:
    config = StateConfig(block_size=B, max_group=max_group, rounding=rounding, num_layouts=2)
    one = example(prompt, response)
    batch = build_batch([one], config, mask_token_id=MASK, rngs=[random.Random(seed)])
    labelled = batch.labels[0] != IGNORE
    assert bool((batch.positions[0][labelled] >= prompt).all())
    assert bool((batch.input_ids[0][labelled] == MASK).all())
    clean = batch.input_ids[0][batch.stream[0] == 0].tolist()
    seen = int(batch.first[0][batch.stream[0] > 0].max())
    assert clean == list(one.tokens[: seen * B]) and seen < len(one.tokens) // B
    assert batch.labels[0][labelled].tolist() == [one.tokens[p] for p in batch.positions[0][labelled].tolist()]
    if rounding == "ceil":
        assert float(batch.weights.sum()) == pytest.approx(1.0)


def test_block_ratio_weights_are_equation_b13() -> None:
    config = StateConfig(block_size=B, max_group=2, weighting="block_ratio", num_layouts=1)
    batch = build_batch([example(4, 11)], config, mask_token_id=MASK, rngs=[random.Random(0)])
    noisy = batch.stream[0] == 1
    blocks = batch.block[0][noisy]
    for block in blocks.unique().tolist():
        weights = batch.weights[0][noisy][(blocks == block) & (batch.labels[0][noisy] != IGNORE)]
        if len(weights):
            assert len(set(weights.tolist())) == 1
            ratio = 1.0 / (4 * float(weights[0]))  # K = 4 blocks
            assert math.floor(ratio * B + 1e-5) == len(weights)


def test_a_malformed_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="a sample of 4 tokens"):
        Example((2, 3, 4, 5), 4)
    config, rngs = StateConfig(block_size=B, max_group=2), [random.Random(0)]
    with pytest.raises(ValueError, match="a sample of 6 tokens"):
        build_batch([Example((2,) * 6, 2)], config, mask_token_id=MASK, rngs=rngs)
    with pytest.raises(ValueError, match="shifted logits"):
        build_batch([Example((2,) * 8, 0)], config, mask_token_id=MASK, rngs=rngs, shift=True)
    one, layout = example(3, 5), GroupLayout((2, 2))  # 12 tokens are three blocks
    noisy = corrupt(one, GroupLayout((3,)), start=0, config=config, mask_token_id=MASK, rng=random.Random(0))
    with pytest.raises(ValueError):
        lay_out(one, [(layout, noisy)], config, first_block=0)


def test_overlong_example_is_not_cut() -> None:
    assert encode_example([2] * 60, [3] * 4, eos_token_id=EOS, block_size=B, max_length=64) is None


CONVERSATION = {"eos_token_id": EOS, "block_size": B, "max_length": 64}


def conversation_of(rng: random.Random) -> tuple[Example, list[Example]]:
    """Three answers as one sample, and as a sample each; turns end anywhere in blocks."""
    tokens = [rng.randrange(2, 30) for _ in range(43)]
    spans = [(5, 12), (18, 19), (30, 43)]
    alone = [encode_example(tokens[:start], tokens[start:stop], **CONVERSATION) for start, stop in spans]
    assert all(example is not None for example in alone)
    return replace(alone[-1], earlier=tuple(alone[:-1])), alone


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("weighting", ["masked_mean", "block_ratio", "self_normalised", "ratio_mean"])
@pytest.mark.parametrize("span", ["content", "response"])
def test_a_conversation_of_several_answers_has_the_losses_of_a_sample_for_each(
    model: Decoder, span: str, weighting: str, shift: bool
) -> None:
    config = StateConfig(
        block_size=B, max_group=3, num_random=1, span=span, weighting=weighting, rounding="ceil", self_denoising="half"
    )
    whole, alone = conversation_of(random.Random(3))
    shared = build_batch([whole], config, mask_token_id=MASK, rngs=[random.Random(7)], shift=shift)
    rng = random.Random(7)  # its draws, answer by answer
    each = build_batch(alone, config, mask_token_id=MASK, rngs=[rng] * 3, shift=shift)
    assert shared.num_tokens < each.num_tokens
    losses, gradients = [], []
    for batch in (shared, each):
        model.zero_grad()
        loss, measures = multitf_loss(model, batch, denominator(batch, weighting))
        loss.backward()
        losses.append(torch.cat([loss.detach()[None], measures]))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    model.zero_grad()
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)
    masked = shared.labels != IGNORE
    assert set(shared.positions[masked].tolist()) <= {*range(5, 16), *range(18, 20), *range(30, 44)}


def test_conversations_of_several_answers_have_no_d2f_sequence() -> None:
    whole, _ = conversation_of(random.Random(3))
    config = StateConfig(block_size=B, layouts="d2f", weighting="ratio_mean")
    with pytest.raises(ValueError):
        build_batch([whole], config, mask_token_id=MASK, rngs=[random.Random(0)])
