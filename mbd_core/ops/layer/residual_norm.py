# mypy: disable-error-code="import-not-found, no-untyped-def"
"""The residual stream as one Triton kernel: a layer's terms, the experts' sum included, and the norm after them.

Values are rounded to the dtype of the stream three times, as with `RMSNorm`: the sum, the normed sum, and its product
with the gain.

Shape legend: T tokens, D model width, K experts a token, E experts, G tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mbd_core.ops.launch import Kernel, launch, power_of_two

tl: Any = None  # triton.language, set when a kernel is compiled


@dataclass(frozen=True)
class ExpertParts:
    """The weighted outputs of each token's experts, not yet summed.

    y_TKD        float32; uninitialised for a token without experts, whose ids in `ids_TK` are all `num_experts`
    """

    y_TKD: Tensor
    ids_TK: Tensor
    num_experts: int


@dataclass(frozen=True)
class RankParts:
    """A part (T, D) on each tensor-parallel rank, in the dtype of the stream, not yet summed.

    addresses_G  int64: the parts' addresses, multiples of 16. This rank can read the parts, and they are written
                 before the next kernel
    """

    addresses_G: Tensor


def _add_norm_kernel(
    x_ptr,
    part_ptr,
    ranks_ptr,
    y_ptr,
    ids_ptr,
    gain_ptr,
    sum_ptr,
    out_ptr,
    D,
    E,
    eps,
    BASE: tl.constexpr,
    ADDS: tl.constexpr,
    RANKS: tl.constexpr,
    NORMS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: sum = x (if BASE) + part + the ranks' parts in their order + its experts' outputs;
    out = norm(sum) * gain."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < D
    at = token * D + channel
    total = tl.zeros((BLOCK,), tl.float32)
    if BASE:
        total += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(part_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(RANKS):
        other_ptr = tl.load(ranks_ptr + rank).to(tl.pointer_type(sum_ptr.dtype.element_ty))
        other_ptr = tl.multiple_of(other_ptr, 16)
        total += tl.load(other_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if K > 0:
        routed = inside & (tl.load(ids_ptr + token * K) < E)
        experts = tl.zeros((BLOCK,), tl.float32)
        for k in range(K):
            experts += tl.load(y_ptr + (token * K + k) * D + channel, mask=routed, other=0.0)
        total += experts
    if ADDS or RANKS > 0 or K > 0:
        rounded = total.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=inside)
        total = rounded.to(tl.float32)
    if NORMS:
        normed = total * tl.rsqrt(tl.sum(total * total, 0) / D + eps)
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
        gain = tl.load(gain_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, (gain * normed).to(out_ptr.dtype.element_ty), mask=inside)


ADD_NORM = Kernel(_add_norm_kernel)


def add_norm(
    x_TD: Tensor,
    gain_D: Tensor | None,
    eps: float,
    *,
    part_TD: Tensor | None = None,
    ranks: RankParts | None = None,
    experts: ExpertParts | None = None,
) -> tuple[Tensor, Tensor]:
    """`x_TD` with `part_TD` and the sums of `ranks` and `experts` added (T, D), and its RMSNorm with `gain_D` (T, D).

    Both are in the dtype of `x_TD`. Without anything to add the first is `x_TD`; without a gain both are the sum.
    """
    x_TD = x_TD.contiguous()
    adds = part_TD is not None or ranks is not None or experts is not None
    sum_TD = torch.empty_like(x_TD) if adds else x_TD
    out_TD = sum_TD if gain_D is None else torch.empty_like(x_TD)
    _launch(x_TD, part_TD, ranks, experts, gain_D, sum_TD, out_TD, eps)
    return sum_TD, out_TD


def sum_experts(
    experts: ExpertParts, dtype: torch.dtype, *, part_TD: Tensor | None = None, out_TD: Tensor | None = None
) -> Tensor:
    """The sum of each token's experts and of `part_TD` (T, D) in `dtype`, written to `out_TD` if it is given."""
    if out_TD is None:
        out_TD = torch.empty_like(experts.y_TKD[:, 0], dtype=dtype, memory_format=torch.contiguous_format)
    _launch(None, part_TD, None, experts, None, out_TD, out_TD, 0.0)
    return out_TD


def _launch(
    x_TD: Tensor | None,
    part_TD: Tensor | None,
    ranks: RankParts | None,
    experts: ExpertParts | None,
    gain_D: Tensor | None,
    sum_TD: Tensor,
    out_TD: Tensor,
    eps: float,
) -> None:
    tokens, width = sum_TD.shape
    block = power_of_two(width)
    y, ids, per_token, num_experts = (sum_TD, sum_TD, 0, 0)
    if experts is not None:
        y, ids, per_token, num_experts = experts.y_TKD, experts.ids_TK, experts.ids_TK.shape[1], experts.num_experts
    launch(
        ADD_NORM,
        (tokens,),
        sum_TD if x_TD is None else x_TD,
        sum_TD if part_TD is None else part_TD.contiguous(),
        ids if ranks is None else ranks.addresses_G,
        y,
        ids,
        sum_TD if gain_D is None else gain_D,
        sum_TD,
        out_TD,
        width,
        num_experts,
        eps,
        BASE=x_TD is not None,
        ADDS=part_TD is not None,
        RANKS=0 if ranks is None else len(ranks.addresses_G),
        NORMS=gain_D is not None,
        K=per_token,
        BLOCK=block,
        num_warps=8 if block > 2048 else 4,
    )
