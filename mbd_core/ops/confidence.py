# mypy: disable-error-code="import-not-found, no-untyped-def"
"""How sure a model is, and of which token, from one reading of its logits: `Vocab.likeliest` as Triton kernels.

Every program goes through a stretch of one position's vocabulary with a running maximum and sum, reading each logit
once, in the type it comes in; a second kernel joins the stretches. So few positions with a large vocabulary keep a GPU
as busy as many.

Triton is imported by the first call, so that this file can be read where Triton is not installed.

Shape legend: P positions, V vocabulary, S stretches of a vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_BLOCK = 1024  # logits a program has in hand at once
_PROGRAMS = 1024  # so many keep the largest GPU busy; more would only be more to join
tl: Any = None  # triton.language, which the kernels look up here


def _stretch_kernel(
    logits_ptr, top_ptr, total_ptr, best_ptr, token_ptr, stride, V, size, mask, SPAN,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of SPAN logits: the largest, the sum of exponentials below it, the largest allowed one and its lowest id."""
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
    top_ptr, total_ptr, best_ptr, token_ptr, chosen_ptr, probability_ptr, S, BLOCK: tl.constexpr
):  # fmt: skip
    """One position's stretches as one."""
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
    chosen = tl.where(chosen == 2147483647, 0, chosen)  # of NaNs none is the largest; an id it must be
    tl.store(chosen_ptr + position, chosen.to(tl.int64))
    tl.store(probability_ptr + position, tl.exp(first - highest) / total)


@functools.cache
def _compiled() -> tuple[Any, Any, Any]:
    """Triton and both kernels, compiled or, where its interpreter is on, interpreted."""
    global tl
    import triton
    import triton.language

    tl = triton.language
    return triton, triton.jit(_stretch_kernel), triton.jit(_join_kernel)


def stretches(num_positions: int, vocabulary: int) -> tuple[int, int]:
    """How many stretches a vocabulary is cut into, and how many logits each has, a multiple of a block."""
    blocks = -(-vocabulary // _BLOCK)
    each = -(-blocks // min(blocks, -(-_PROGRAMS // max(num_positions, 1))))
    return -(-blocks // each), each * _BLOCK


def confidence(logits_PV: Tensor, *, mask_token_id: int, size: int) -> tuple[Tensor, Tensor]:
    """The likeliest token (P,) that may be predicted, and its probability (P,) in float32.

    That may be ids below `size` but the mask's. The probability is the model's own, over its whole vocabulary: the
    others keep their share. Ties go to the lowest id. Shapes depend on P and V alone: a CUDA graph can hold it. Raises
    `ValueError` for logits that are no rows of neighbouring numbers.
    """
    positions, vocabulary = logits_PV.shape
    if logits_PV.stride(1) != 1:
        raise ValueError(
            f"logits of shape {tuple(logits_PV.shape)} have strides {logits_PV.stride()}; make their rows contiguous"
        )
    triton, stretch_kernel, join_kernel = _compiled()
    count, span = stretches(positions, vocabulary)
    device = logits_PV.device
    top, total, best = torch.empty((3, positions, count), dtype=torch.float32, device=device)
    token = torch.empty((positions, count), dtype=torch.int32, device=device)
    chosen_P = torch.empty(positions, dtype=torch.int64, device=device)
    probability_P = torch.empty(positions, dtype=torch.float32, device=device)
    if positions:
        stretch_kernel[(positions, count)](
            logits_PV, top, total, best, token, logits_PV.stride(0), vocabulary, size, mask_token_id, span,
            BLOCK=_BLOCK,
        )  # fmt: skip
        join_kernel[(positions,)](
            top, total, best, token, chosen_P, probability_P, count, BLOCK=triton.next_power_of_2(count)
        )
    return chosen_P, probability_P
