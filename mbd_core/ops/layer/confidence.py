# mypy: disable-error-code="import-not-found, no-untyped-def"
"""The likeliest token and its probability from one read of the logits: `Vocab.likeliest` as Triton kernels, for a
whole vocabulary or a rank's part.

Every program reads a stretch of one position's vocabulary, each logit once and in its own dtype, with a running
maximum and sum; a second kernel joins the stretches. A step with few positions therefore still fills the GPU. The
stretches depend only on the vocabulary, so a position's sum has the same bits in every batch.

Shape legend: P positions, V vocabulary, S stretches of a vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mbd_core.ops.launch import Kernel, launch, power_of_two

_BLOCK = 1024  # logits that a program holds at once
_SPAN = 4 * _BLOCK  # logits of a stretch: a block of 32 positions of a large vocabulary is more than 1,000 programs
tl: Any = None  # triton.language, set when a kernel is compiled


def _stretch_kernel(
    logits_ptr,
    top_ptr,
    total_ptr,
    best_ptr,
    token_ptr,
    stride,
    V,
    size,
    mask,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of SPAN logits x: max x, sum exp(x - max x), and the largest logit of an allowed id with the lowest such id."""
    position, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.full((BLOCK,), 2147483647, tl.int32)
    for start in range(0, SPAN, BLOCK):
        ids = stretch * SPAN + start + tl.arange(0, BLOCK)
        inside = ids < V
        x = tl.load(logits_ptr + position * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        better = (x > best) & (ids < size) & (ids != mask)
        best = tl.where(better, x, best)
        token = tl.where(better, ids, token)
    highest = tl.max(top, 0)
    first = tl.max(best, 0)
    place = position * tl.num_programs(1) + stretch
    tl.store(top_ptr + place, highest)
    tl.store(total_ptr + place, tl.sum(total * tl.exp(top - highest), 0))
    tl.store(best_ptr + place, first)
    tl.store(token_ptr + place, tl.min(tl.where(best == first, token, 2147483647), 0))


def _join_kernel(
    top_ptr, total_ptr, best_ptr, token_ptr, chosen_ptr, probability_ptr, logit_ptr, lse_ptr, S, BLOCK: tl.constexpr
):
    """Join the stretches of one position."""
    position = tl.program_id(0).to(tl.int64)
    stretch = tl.arange(0, BLOCK)
    inside, place = stretch < S, position * S + stretch
    top = tl.load(top_ptr + place, mask=inside, other=-3.0e38)
    highest = tl.max(top, 0)
    total = tl.sum(tl.load(total_ptr + place, mask=inside, other=0.0) * tl.exp(top - highest), 0)
    best = tl.load(best_ptr + place, mask=inside, other=float("-inf"))
    first = tl.max(best, 0)
    token = tl.load(token_ptr + place, mask=inside, other=2147483647)
    chosen = tl.min(tl.where(best == first, token, 2147483647), 0)
    chosen = tl.where(chosen == 2147483647, 0, chosen)  # if all logits are NaN, none is the largest
    tl.store(chosen_ptr + position, chosen.to(tl.int64))
    tl.store(probability_ptr + position, tl.exp(first - highest) / total)
    tl.store(logit_ptr + position, first)
    tl.store(lse_ptr + position, highest + tl.log(total))


STRETCH = Kernel(_stretch_kernel)
JOIN = Kernel(_join_kernel)


def num_stretches(vocabulary: int) -> int:
    """The number of stretches of a vocabulary."""
    return -(-vocabulary // _SPAN)


def confidence(logits_PV: Tensor, *, mask_token_id: int, size: int) -> tuple[Tensor, Tensor]:
    """The likeliest token (P,) that may be predicted, and its probability (P,) in float32.

    Ids below `size` other than the mask's may be predicted. The probability is taken over the whole vocabulary, so ids
    that may not be predicted keep their share. Ties go to the lowest id. Shapes depend only on P and V, so a CUDA
    graph can capture the call. Raises `ValueError` for logits whose rows are not contiguous.
    """
    return _read(logits_PV, mask_token_id=mask_token_id, size=size)[:2]


def part_confidence(logits_PV: Tensor, *, mask_token_id: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For a part of the vocabulary: the likeliest predictable place (P,), its logit (P,), and the logarithm (P,) of
    the sum of all exponentials, both in float32.

    `mask_token_id` and `size` are counted from the part's first id and may lie outside of it. The rest is as in
    `confidence`.
    """
    chosen_P, _, logit_P, lse_P = _read(logits_PV, mask_token_id=mask_token_id, size=size)
    return chosen_P, logit_P, lse_P


def _read(logits_PV: Tensor, *, mask_token_id: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The likeliest token of each position, its probability, its logit, and the logarithm of the sum."""
    positions, vocabulary = logits_PV.shape
    if logits_PV.stride(1) != 1:
        raise ValueError(
            f"logits of shape {tuple(logits_PV.shape)} have strides {logits_PV.stride()}; make their rows contiguous"
        )
    count = num_stretches(vocabulary)
    device = logits_PV.device
    # separate tensors, which begin at multiples of 16 bytes, because Triton compiles for the alignment it sees
    top, total, best = (torch.empty((positions, count), dtype=torch.float32, device=device) for _ in range(3))
    token = torch.empty((positions, count), dtype=torch.int32, device=device)
    chosen_P = torch.empty(positions, dtype=torch.int64, device=device)
    probability_P, logit_P, lse_P = (torch.empty(positions, dtype=torch.float32, device=device) for _ in range(3))
    if positions:
        launch(
            STRETCH,
            (positions, count),
            logits_PV,
            top,
            total,
            best,
            token,
            logits_PV.stride(0),
            vocabulary,
            size,
            mask_token_id,
            SPAN=_SPAN,
            BLOCK=_BLOCK,
        )
        launch(
            JOIN,
            (positions,),
            top,
            total,
            best,
            token,
            chosen_P,
            probability_P,
            logit_P,
            lse_P,
            count,
            BLOCK=power_of_two(count),
        )
    return chosen_P, probability_P, logit_P, lse_P
