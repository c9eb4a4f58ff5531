"""Paged attention in plain torch: the definition of correct, and the CPU engine's kernel.

Block-causality needs no mask. A block attends, without order inside itself, to all keys up to its own end; so each
block is one non-causal row with its own key length, the shape that `flash_attn_varlen_func(..., causal=False)` takes.

Two computations of the same thing. `attend_by_rows` takes each row by itself over exactly its keys: the definition,
and bitwise independent of what else is in the batch. `attend_shared` reads the keys of a sequence once for all its
neighbouring rows (the slots of a buffer, the blocks of a prompt chunk) and batches sequences of like length.

Shape legend: T packed query tokens, R rows (one block of one sequence each), P pages a row, S page size, H query
heads, K key/value heads, C head channels; in a bundle G sequences, Q query tokens of each, L keys of each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# A chunk's blocks see keys of growing number; more queries than this in one call would mostly mask.
_MOST_QUERIES = 512
# Sequences whose key counts differ by less than this share a call; the shorter ones are padded.
_PADDING = 1.25
_SHORT = 256
# Keys gathered for one call: beyond this they leave the cache, which costs more than a call.
_MOST_KEYS = 2048


@dataclass(frozen=True)
class Bundle:
    """Sequences attended in one call. `seen_GQL` is None where every query sees all `num_keys` keys.

    whole  `tokens_GQ` are all tokens in their order, so that nothing needs to be picked out
    """

    tokens_GQ: Tensor
    pages_GP: Tensor
    seen_GQL: Tensor | None
    num_keys: int
    whole: bool = False


def paged_attention(
    q_THC: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    cu_seqlens_q: Tensor,
    kv_lens_R: Tensor,
    page_table_RP: Tensor,
    exact: bool = False,
    max_q: int | None = None,
) -> Tensor:
    """Row r's queries attend to the first `kv_lens_R[r]` keys of its pages, all of them, scaled by C^-1/2.

    `q_THC` holds the rows one after another, bounded by `cu_seqlens_q` (R + 1); `k_pages`, `v_pages` are one layer's
    (pages, S, K, C). A row with queries needs a key length of at least 1. `exact` makes a row's result bitwise
    independent of the other rows. `max_q` (the longest row) is for kernels that need it on the host; not this one.
    Returns (T, H, C).
    """
    if exact:
        bounds, kv_lens = cu_seqlens_q.tolist(), kv_lens_R.tolist()
        return attend_by_rows(q_THC, k_pages, v_pages, bounds=bounds, kv_lens=kv_lens, page_table_RP=page_table_RP)
    bundles = plan_bundles(cu_seqlens_q, kv_lens_R, page_table_RP, page_size=k_pages.shape[1])
    return attend_shared(q_THC, k_pages, v_pages, bundles)


def attend_by_rows(
    q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, *, bounds: list[int], kv_lens: list[int], page_table_RP: Tensor
) -> Tensor:
    """Each row in a call of its own, its operands freshly laid out: same row, same shapes, same bits."""
    out_THC = torch.empty_like(q_THC)
    size = k_pages.shape[1]
    for row, num_keys in enumerate(kv_lens):
        start, stop = bounds[row], bounds[row + 1]
        if start == stop:
            continue
        pages = page_table_RP[row : row + 1, : -(-num_keys // size)]
        q_GQHC = q_THC[None, start:stop].clone()
        out_THC[start:stop] = _attend(q_GQHC, *_gather(k_pages, v_pages, pages, num_keys), None)[0][0]
    return out_THC


def plan_bundles(
    cu_seqlens_q: Tensor, kv_lens_R: Tensor, page_table_RP: Tensor, *, page_size: int
) -> tuple[Bundle, ...]:
    """Which rows are attended together: a function of the batch's layout, so one plan serves all layers of a step.

    Neighbouring rows with the same pages are one sequence; sequences with as many queries and about as many keys share
    a bundle. Costs one look at the row lengths on the host and Python proportional to rows, not to tokens.
    """
    device = page_table_RP.device
    bounds, kv_lens = cu_seqlens_q.tolist(), kv_lens_R.tolist()
    same = (page_table_RP[1:] == page_table_RP[:-1]).all(-1).tolist()
    groups: dict[tuple[int, int], list[_Member]] = {}
    row, num_rows = 0, len(kv_lens)
    while row < num_rows:
        start, stop, least, most = bounds[row], bounds[row + 1], kv_lens[row], kv_lens[row]
        last = row + 1
        while last < num_rows and same[last - 1] and bounds[last + 1] - start <= _MOST_QUERIES:
            stop, least, most = bounds[last + 1], min(least, kv_lens[last]), max(most, kv_lens[last])
            last += 1
        level = math.ceil(math.log(max(most, _SHORT) / _SHORT, _PADDING))
        groups.setdefault((stop - start, level), []).append((row, start, least, most))
        row = last

    bundles = []
    kv_lens_T: Tensor | None = None
    for queries, members in _in_parts(groups):
        rows, starts, least_keys, most_keys = zip(*members, strict=True)
        num_keys = max(most_keys)
        tokens_GQ = torch.tensor(starts, device=device)[:, None] + torch.arange(queries, device=device)
        pages_GP = page_table_RP[torch.tensor(rows, device=device), : -(-num_keys // page_size)]
        seen_GQL = None
        if min(least_keys) < num_keys:
            if kv_lens_T is None:
                kv_lens_T = kv_lens_R.repeat_interleave((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long())
            seen_GQL = torch.arange(num_keys, device=device) < kv_lens_T[tokens_GQ][..., None]
        # sequences of one bundle keep their order
        whole = len(members) * queries == bounds[-1]
        bundles.append(
            Bundle(tokens_GQ=tokens_GQ, pages_GP=pages_GP, seen_GQL=seen_GQL, num_keys=num_keys, whole=whole)
        )
    return tuple(bundles)


_Member = tuple[int, int, int, int]
"""A sequence to attend: its first row, its first token, the fewest and the most keys one of its rows sees."""


def _in_parts(groups: dict[tuple[int, int], list[_Member]]) -> Iterator[tuple[int, list[_Member]]]:
    """Queries and sequences of every bundle: like sequences, as many as keep their keys in the cache."""
    for (queries, _), members in groups.items():
        if queries:
            step = max(1, _MOST_KEYS // max(most for *_, most in members))
            for start in range(0, len(members), step):
                yield queries, members[start : start + step]


def attend_shared(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, bundles: tuple[Bundle, ...]) -> Tensor:
    """Attention of a planned batch (T, H, C): keys gathered once a sequence."""
    if len(bundles) == 1 and bundles[0].whole:
        bundle = bundles[0]
        k, v = _gather(k_pages, v_pages, bundle.pages_GP, bundle.num_keys)
        q_GQHC = q_THC.unflatten(0, tuple(bundle.tokens_GQ.shape))
        return _attend(q_GQHC, k, v, bundle.seen_GQL)[0].flatten(0, 1)
    out_THC = torch.empty_like(q_THC)
    for bundle in bundles:
        k, v = _gather(k_pages, v_pages, bundle.pages_GP, bundle.num_keys)
        out_THC[bundle.tokens_GQ] = _attend(q_THC[bundle.tokens_GQ], k, v, bundle.seen_GQL)[0]
    return out_THC


def attend_shared_lse(
    q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, bundles: tuple[Bundle, ...]
) -> tuple[Tensor, Tensor]:
    """As `attend_shared`, and the log-sum-exp of every query's scaled scores, float32 (T, H)."""
    out_THC = torch.empty_like(q_THC)
    lse_TH = q_THC.new_empty(q_THC.shape[:2], dtype=torch.float32)
    for bundle in bundles:
        k, v = _gather(k_pages, v_pages, bundle.pages_GP, bundle.num_keys)
        out, lse = _attend(q_THC[bundle.tokens_GQ], k, v, bundle.seen_GQL, with_lse=True)
        assert lse is not None
        out_THC[bundle.tokens_GQ], lse_TH[bundle.tokens_GQ] = out, lse
    return out_THC, lse_TH


def _gather(k_pages: Tensor, v_pages: Tensor, pages_GP: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """The first `num_keys` keys and values of each sequence, (G, K, L, C)."""
    k = k_pages[pages_GP].flatten(1, 2)[:, :num_keys]
    v = v_pages[pages_GP].flatten(1, 2)[:, :num_keys]
    return k.transpose(1, 2), v.transpose(1, 2)


def _attend(
    q_GQHC: Tensor, k_GKLC: Tensor, v_GKLC: Tensor, seen_GQL: Tensor | None, *, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention (G, Q, H, C) and, on request, its log-sum-exp (G, Q, H).

    The query heads of one key head are stacked along the queries, which have no order: keys are never repeated.
    """
    groups, queries, heads, channels = q_GQHC.shape
    kv_heads = k_GKLC.shape[1]
    share = heads // kv_heads
    q = q_GQHC.unflatten(2, (kv_heads, share)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    seen = None if seen_GQL is None else torch.cat([seen_GQL] * share, dim=1)[:, None]
    lse = None
    if with_lse:
        out, lse = _attend_lse(q, k_GKLC, v_GKLC, seen)
        lse = lse.unflatten(2, (share, queries)).permute(0, 3, 1, 2).flatten(2)
    else:
        out = F.scaled_dot_product_attention(q, k_GKLC, v_GKLC, attn_mask=seen)
    out = out.unflatten(2, (share, queries)).permute(0, 3, 1, 2, 4).reshape(groups, queries, heads, channels)
    return out, lse


def _attend_lse(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp where `seen` (None: everywhere); the CPU's flash kernel gives both."""
    if q.device.type == "cpu":
        bias = None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -math.inf)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
        return out, lse.float()
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse
