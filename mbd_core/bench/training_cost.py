"""The operations of a training sample's forward, counted: one shared clean stream against separate ones.

Counted are the multiplications of the layers' matrices and of the attention; not the embedding, and not the last
layer's MLP, the head and the loss, which take the same labelled positions either way. The backward pass is twice the
forward.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mbd_core.models.flops import matrix_flops, mlp_flops, pair_flops
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.layout import GroupLayout, layout_set
from mbd_core.multitf.mask import dual_stream_mask

Attention = Literal["dense", "flex"]
FLEX_BLOCK = 128
"""Positions on a side of a block that FlexAttention computes whole or not at all."""


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """A sample's forward: training tokens, pairs of tokens that the attention computes, operations."""

    tokens: int
    pairs: int
    flops: float


def token_ratio(num_layouts: int) -> float:
    """2n / (n + 1): tokens of n sequences `[x_t; x_0]` over those of n noisy streams with one clean stream."""
    return 2 * num_layouts / (num_layouts + 1)


def computed_pairs(layouts: Sequence[GroupLayout], block_size: int, attention: Attention) -> int:
    """Pairs that the attention computes of the streams of `layouts` and their clean stream.

    Dense attention computes all. FlexAttention computes the blocks of `FLEX_BLOCK` squared with a visible pair.
    """
    num_blocks = layouts[0].num_blocks
    length = (len(layouts) + 1) * num_blocks * block_size
    if attention == "dense":
        return length**2
    stream = torch.arange(1, len(layouts) + 2).remainder(len(layouts) + 1).repeat_interleave(num_blocks)
    block = torch.arange(num_blocks).repeat(len(layouts) + 1)
    first = torch.tensor([a for layout in layouts for a in layout.first_blocks()] + list(range(1, num_blocks + 1)))
    queries, keys = np.nonzero(dual_stream_mask(stream, block, first).numpy())
    side = -(-length // FLEX_BLOCK)
    computed = np.zeros((side, side), dtype=bool)
    starts, ends = (np.arange(len(stream)) * block_size // FLEX_BLOCK, _last_block(len(stream), block_size))
    for rows in range(int((ends - starts).max()) + 1):
        for columns in range(int((ends - starts).max()) + 1):
            at = np.minimum(starts[queries] + rows, ends[queries]), np.minimum(starts[keys] + columns, ends[keys])
            computed[at] = True
    return int(computed.sum()) * FLEX_BLOCK**2


def _last_block(count: int, block_size: int) -> np.ndarray:
    return (np.arange(1, count + 1) * block_size - 1) // FLEX_BLOCK


def sample_cost(
    config: ModelConfig, layouts: Sequence[GroupLayout], block_size: int, *, attention: Attention, shared: bool
) -> SampleCost:
    """The forward of one sample whose layouts are over `layouts[0].num_blocks` blocks.

    `shared`: one sequence with one clean stream; otherwise each layout is a sequence with a clean stream of its own.
    """
    sequences = [list(layouts)] if shared else [[layout] for layout in layouts]
    tokens = sum(len(of) + 1 for of in sequences) * layouts[0].num_blocks * block_size
    pairs = sum(computed_pairs(of, block_size, attention) for of in sequences)
    everywhere = matrix_flops(config) - mlp_flops(config, config.num_layers - 1)
    return SampleCost(tokens=tokens, pairs=pairs, flops=tokens * everywhere + pairs * pair_flops(config))


def count_row(
    config: ModelConfig, *, max_group: int, num_random: int, length: int, seed: int = 0
) -> dict[str, float | int]:
    """One row of the table: a group size and a number of random layouts over samples of `length` tokens.

    Raises `ValueError` for a length that is no whole number of the model's blocks.
    """
    size = config.block_size
    if length % size or length < size:
        raise ValueError(f"--length {length} is no whole number of blocks of {size}")
    layouts = layout_set(length // size, max_group=max_group, num_random=num_random, rng=random.Random(seed))
    row: dict[str, float | int] = {
        "max_group": max_group,
        "num_random": num_random,
        "layouts": len(layouts),
        "length": length,
        "token_ratio": token_ratio(len(layouts)),
    }
    for shared, name in ((False, "separate"), (True, "shared")):
        for attention in ("dense", "flex"):
            cost = sample_cost(config, layouts, size, attention=attention, shared=shared)
            row[f"{name}_{attention}_tflop"] = cost.flops / 1e12
            row[f"{name}_tokens"] = cost.tokens
    for attention in ("dense", "flex"):
        row[f"{attention}_gain"] = row[f"separate_{attention}_tflop"] / row[f"shared_{attention}_tflop"]
    return row
