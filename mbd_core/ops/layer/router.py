# mypy: disable-error-code="import-not-found, no-untyped-def"
"""The choice of each token's experts from the router's logits as Triton kernels: `models.mlp.Router`'s rule.

A program of the first kernel takes one token. Its experts lie in registers, a row for each group; the program takes
the best allowed expert, K times over. Ties go to the lowest expert. With a capacity the second kernel runs before the
first: each of its programs takes one decoding block, and marks the experts that the block's tokens may choose.

Shape legend: T tokens, E experts, K experts a token, S shared experts, N blocks, B block size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mbd_core.ops.launch import Kernel, launch, power_of_two

tl: Any = None  # triton.language, set when a kernel is compiled


def _route_kernel(
    logits_ptr,
    bias_ptr,
    live_ptr,
    kept_ptr,
    ids_ptr,
    weights_ptr,
    scaling,
    E: tl.constexpr,
    B: tl.constexpr,
    LIMITED: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BIASED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One token: the K best experts of the KEPT best groups, and their weights; after them the SHARED experts."""
    token = tl.program_id(0).to(tl.int64)
    least = float("-inf")
    number = tl.arange(0, BLOCK_G)
    group, member = number[:, None], tl.arange(0, BLOCK_E)[None, :]
    inside = (group < GROUPS) & (member < E // GROUPS)
    expert = tl.where(inside, group * (E // GROUPS) + member, E)
    logits = tl.load(logits_ptr + token * E + expert, mask=inside, other=least)
    if SIGMOID:
        score = tl.sigmoid(logits)
    else:
        score = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    choice = score
    if BIASED:
        choice = choice + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, least)
    if LIMITED:
        kept = tl.load(kept_ptr + token // B * E + expert, mask=inside, other=0)
        choice = tl.where(kept != 0, choice, least)
    if GROUPS > 1:
        first = tl.max(choice, 1)
        first_at = tl.min(tl.where(choice == first[:, None], expert, E), 1)
        second = tl.max(tl.where(expert == first_at[:, None], least, choice), 1)
        best = first + second
        better = best[None, :] > best[:, None]
        earlier = (best[None, :] == best[:, None]) & (number[None, :] < number[:, None])
        rank = tl.sum((better | earlier).to(tl.int32), 1)
        choice = tl.where((rank < KEPT)[:, None], choice, least)
    column = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int64)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for k in range(K):
        top = tl.max(tl.max(choice, 1), 0)
        at = tl.min(tl.min(tl.where(choice == top, expert, E), 1), 0)
        at = tl.minimum(at, E - 1)  # NaN equals nothing: `at` would be E
        weight = tl.sum(tl.sum(tl.where(expert == at, score, 0.0), 1), 0)
        ids = tl.where(column == k, at.to(tl.int64), ids)
        weights = tl.where(column == k, weight, weights)
        choice = tl.where(expert == at, least, choice)
    if NORMALIZES:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights = weights * scaling
    if SHARED > 0:
        ids = tl.where(column < K, ids, (E - K + column).to(tl.int64))
        weights = tl.where(column < K, weights, 1.0)
    if MASKED:
        ids = tl.where(tl.load(live_ptr + token) != 0, ids, E + SHARED)
    place = token * (K + SHARED) + column
    tl.store(ids_ptr + place, ids, mask=column < K + SHARED)
    tl.store(weights_ptr + place, weights, mask=column < K + SHARED)


def _keep_experts_kernel(
    logits_ptr,
    bias_ptr,
    kept_ptr,
    E: tl.constexpr,
    B: tl.constexpr,
    CAPACITY: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One block: `kept` gets 1 for its CAPACITY best experts and 0 for the others. An expert counts with its largest
    value over the block's B tokens."""
    block = tl.program_id(0).to(tl.int64)
    least = float("-inf")
    expert = tl.arange(0, BLOCK_E)
    inside = expert < E
    best = tl.full((BLOCK_E,), least, tl.float32)
    for token in range(B):
        logits = tl.load(logits_ptr + (block * B + token) * E + expert, mask=inside, other=least)
        if SIGMOID:
            score = tl.sigmoid(logits)
        else:
            score = tl.exp(logits - tl.max(logits, 0))
            score = score / tl.sum(score, 0)
        best = tl.maximum(best, score)
    if BIASED:
        best = best + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    best = tl.where(inside, best, least)
    kept = tl.zeros((BLOCK_E,), tl.int8)
    for _ in range(CAPACITY):
        top = tl.max(best, 0)
        at = tl.min(tl.where(best == top, expert, E), 0)
        kept = tl.where(expert == at, 1, kept).to(tl.int8)
        best = tl.where(expert == at, least, best)
    tl.store(kept_ptr + block * E + expert, kept, mask=inside)


ROUTE = Kernel(_route_kernel)
KEEP_EXPERTS = Kernel(_keep_experts_kernel)


def route(
    logits_TE: Tensor,
    *,
    per_token: int,
    sigmoid: bool,
    bias_E: Tensor | None,
    num_groups: int,
    kept_groups: int,
    normalizes: bool,
    scaling: float,
    num_shared: int = 0,
    live_T: Tensor | None = None,
    capacity: int = 0,
    block_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Expert ids (T, K + S) int64, best first, and their weights (T, K + S) float32, of float32 logits (T, E).

    `models.mlp.Router` fills the arguments from `MoEConfig`. With a `capacity` the tokens are whole blocks, and groups
    do not count. The `num_shared` (S) shared experts, E to E + S - 1, stand last with weight 1. Where `live_T` is
    false, all ids are E + S, which is no expert.
    """
    tokens, experts = logits_TE.shape
    columns = per_token + num_shared
    ids_TK = torch.empty((tokens, columns), dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty((tokens, columns), dtype=torch.float32, device=logits_TE.device)
    logits_TE = logits_TE.contiguous()
    kept_NE = torch.empty(
        (tokens // block_size if capacity else 0, experts), dtype=torch.int8, device=logits_TE.device
    )
    if capacity:
        num_groups = kept_groups = 1
        launch(
            KEEP_EXPERTS,
            (len(kept_NE),),
            logits_TE,
            logits_TE if bias_E is None else bias_E,
            kept_NE,
            E=experts,
            B=block_size,
            CAPACITY=capacity,
            SIGMOID=sigmoid,
            BIASED=bias_E is not None,
            BLOCK_E=power_of_two(experts),
            num_warps=1 if experts <= 256 else 4,
        )
    launch(
        ROUTE,
        (tokens,),
        logits_TE,
        logits_TE if bias_E is None else bias_E,
        logits_TE if live_T is None else live_T,
        kept_NE if capacity else logits_TE,
        ids_TK,
        weights_TK,
        scaling,
        E=experts,
        B=block_size,
        LIMITED=capacity > 0,
        SHARED=num_shared,
        GROUPS=num_groups,
        KEPT=kept_groups,
        K=per_token,
        SIGMOID=sigmoid,
        NORMALIZES=normalizes,
        BIASED=bias_E is not None,
        MASKED=live_T is not None,
        BLOCK_G=power_of_two(num_groups),
        BLOCK_E=power_of_two(experts // num_groups),
        BLOCK_K=power_of_two(columns),
        num_warps=1 if experts <= 256 else 4,
    )
    return ids_TK, weights_TK
