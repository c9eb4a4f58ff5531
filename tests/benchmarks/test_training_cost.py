"""Operations counted by hand, and blocks as FlexAttention's own block mask has them."""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.training import (
    FLEX_BLOCK,
    computed_pairs,
    count_row,
    matrix_flops,
    mlp_flops,
    pair_flops,
    sample_cost,
    token_ratio,
)
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.states.layout import GroupLayout, layout_set
from mbd_core.multitf.states.mask import dual_stream_sees
from mbd_core.ops.attention.whole import block_mask

SMALL = replace(
    SHAPES["sdar-50m"], num_layers=2, hidden_size=10, intermediate_size=20, num_heads=3, num_kv_heads=1, head_dim=4
)


def test_a_token_and_a_pair_cost_what_their_products_do() -> None:
    attention = 10 * 12 + 2 * 10 * 4 + 12 * 10  # q, k and v, o
    assert mlp_flops(SMALL, 1) == 2 * 3 * 10 * 20
    assert matrix_flops(SMALL) == 2 * 2 * (attention + 3 * 10 * 20)
    assert pair_flops(SMALL) == 2 * 4 * 12


def test_two_blocks_in_one_group_by_hand() -> None:
    """Noisy blocks see 1 and 2 noisy ones, clean blocks 1 and 2 clean ones: 6 of 16; the clean ones count once."""
    one, two = GroupLayout((2,)), GroupLayout((1, 1))
    assert computed_pairs([one], FLEX_BLOCK, "flex") == 6 * FLEX_BLOCK**2
    assert computed_pairs([one], FLEX_BLOCK, "dense") == 16 * FLEX_BLOCK**2
    assert computed_pairs([two], FLEX_BLOCK, "flex") == (2 + 1 + 3) * FLEX_BLOCK**2  # alone; one clean; clean
    assert computed_pairs([one, two], FLEX_BLOCK, "flex") == (3 + 3 + 3) * FLEX_BLOCK**2
    cost = sample_cost(SMALL, [one, two], FLEX_BLOCK, attention="flex", shared=True)
    assert cost.tokens == 6 * FLEX_BLOCK and cost.pairs == 9 * FLEX_BLOCK**2
    everywhere = matrix_flops(SMALL) - mlp_flops(SMALL, 1)
    assert cost.flops == cost.tokens * everywhere + cost.pairs * pair_flops(SMALL)
    apart = sample_cost(SMALL, [one, two], FLEX_BLOCK, attention="dense", shared=False)
    assert apart.tokens == 8 * FLEX_BLOCK and apart.pairs == 2 * 16 * FLEX_BLOCK**2


@pytest.mark.parametrize(("size", "num_blocks"), [(4, 70), (32, 11), (48, 7), (160, 3)])
def test_blocks_are_those_of_the_block_mask(size: int, num_blocks: int) -> None:
    """Also where a diffusion block is no part of a block of the mask, or larger than one."""
    layouts = layout_set(num_blocks, max_group=2, num_random=1, rng=random.Random(0))
    blocks = torch.arange(num_blocks).repeat_interleave(size)
    stream = torch.tensor([1, 2, 3, 0]).repeat_interleave(len(blocks))
    firsts = [torch.tensor(layout.first_blocks()).repeat_interleave(size) for layout in layouts]
    numbers = (stream, blocks.repeat(4), torch.cat([*firsts, blocks + 1]))
    sees = dual_stream_sees(*(n[None] for n in numbers))
    mask = block_mask(sees, batch=1, length=len(stream), device=torch.device("cpu"))
    computed = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert computed_pairs(layouts, size, "flex") == computed * FLEX_BLOCK**2


def test_sharing_pays_with_flex_at_any_length_and_dense_at_none() -> None:
    rows = [count_row(SHAPES["sdar-8b"], max_group=4, num_random=3, length=length) for length in (2048, 4096)]
    for row in rows:
        assert row["layouts"] == 12 and row["token_ratio"] == token_ratio(12) == pytest.approx(24 / 13)
        assert row["separate_tokens"] / row["shared_tokens"] == pytest.approx(row["token_ratio"])
        assert row["flex_gain"] == pytest.approx(row["token_ratio"], rel=0.02)
    assert [round(row["separate_dense_tflop"]) for row in rows] == [787, 1811]
    assert [round(row["shared_dense_tflop"]) for row in rows] == [780, 2396]
    with pytest.raises(ValueError, match="no whole number of blocks of 32"):
        count_row(SHAPES["sdar-8b"], max_group=2, num_random=0, length=100)
