# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Paged attention in Triton, for GPUs without a flash-attention package.

A program takes one sequence, one key head and one split of its keys. Its rows are the queries of all slots of the
sequence, times the query heads that share the key head, up to `_MOST_ROWS`. Each row has its own key length, in causal
slots too, and with a window its own first key. So the keys of a prefix are read once for all rows, and keys before
every row's window are not read. A second kernel joins the splits by their log-sum-exp.

The number of splits depends only on the number of programs. The device computes each split's keys from the keys that
some row sees, so a captured step splits short and long sequences evenly. Splits without keys end at once. Nothing is
read on the host.

Values past the longest row of a tile are never multiplied. Values past a row's own length, within another row of its
sequence, are multiplied by zero, so they must be finite.

Shape legend: T packed query tokens, R rows, P pages a row, S page size, H query heads, K key/value heads, C channels,
N splits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mbd_core.ops.attention.definition import BoundAttention, RowLayout
from mbd_core.ops.launch import Kernel, launch, power_of_two

_MOST_ROWS = 128  # queries times heads that a program holds: more would not fit into its registers
_EXACT_ROWS = 64  # the same for `exact` layouts, whatever else is in the batch
_PROGRAMS = 132  # one for each multiprocessor of an H100, on which two of the largest programs do not fit
# stages of the loop over keys: page numbers, then keys and values; with fewer than 5 no load runs ahead of a product
_STAGES = 5
_WIDE_STAGES = 2  # the same for heads with more than 256 channels: more stages would not fit into shared memory
_MOST_SPLITS = 16  # each split's sums are written and read again
tl: Any = None  # triton.language, set when a kernel is compiled


def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    bounds_ptr,
    keys_ptr,
    first_keys_ptr,
    hidden_ptr,
    table_ptr,
    q_token,
    q_head,
    k_page,
    k_place,
    k_head,
    v_page,
    v_place,
    v_head,
    table_row,
    tiles,
    length,
    num_out,
    scale,
    EACH: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    GAP: tl.constexpr,
    SHARE: tl.constexpr,
    C: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One split of a sequence for one key head: each row's output and its sum's base-2 logarithm, or the result."""
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head, split = tl.program_id(1), tl.program_id(2)
    first = tl.load(bounds_ptr + sequence * EACH)
    end = tl.load(bounds_ptr + (sequence + 1) * EACH)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = first + row // SHARE
    query_head = head * SHARE + row % SHARE
    live = token < end
    if CAUSAL:  # each token has a number of keys
        keys = tl.load(keys_ptr + token, mask=live, other=0)
    elif EACH == 1:
        keys = tl.where(live, tl.load(keys_ptr + sequence), 0)
    else:
        keys = tl.load(keys_ptr + sequence * EACH + row // SHARE // length, mask=live, other=0)
    most, least = tl.max(keys, 0), 0
    if WINDOW:
        first_keys = tl.load(first_keys_ptr + token, mask=live, other=most)
        least = tl.min(first_keys, 0) // BLOCK_N * BLOCK_N
    if GAP:
        first_hidden = tl.load(hidden_ptr + token, mask=live, other=0)
        stop_hidden = tl.load(hidden_ptr + num_out + token, mask=live, other=0)
    span = tl.cdiv(tl.cdiv(most - least, SPLITS), BLOCK_N) * BLOCK_N
    start = least + split * span
    stop = tl.minimum(start + span, most)
    place = token if SPLITS == 1 else split * num_out + token
    place = place.to(tl.int64) * (tl.num_programs(1) * SHARE) + query_head
    if start >= most:
        if SPLITS > 1:
            tl.store(lse_ptr + place, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=live)
        return
    channel = tl.arange(0, BLOCK_C)
    deep = channel < C
    q_at = q_ptr + token[:, None].to(tl.int64) * q_token + query_head[:, None] * q_head + channel[None, :]
    q = tl.load(q_at, mask=live[:, None] & deep[None, :], other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    pages = table_ptr + (sequence * EACH).to(tl.int64) * table_row
    for begin in range(start, stop, BLOCK_N):
        at = begin + tl.arange(0, BLOCK_N)
        inside = at < stop
        page = tl.load(pages + at // PAGE, mask=inside, other=0).to(tl.int64)
        k_at = page * k_page + (at % PAGE) * k_place + head * k_head
        k = tl.load(k_ptr + (k_at[None, :] + channel[:, None]), mask=inside[None, :] & deep[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where((at[None, :] < keys[:, None]) & inside[None, :], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(at[None, :] >= first_keys[:, None], scores, float("-inf"))
        if GAP:
            hidden = (at[None, :] >= first_hidden[:, None]) & (at[None, :] < stop_hidden[:, None])
            scores = tl.where(hidden, float("-inf"), scores)
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        weight = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(top - shift)
        total = total * kept + tl.sum(weight, 1)
        v_at = page * v_page + (at % PAGE) * v_place + head * v_head
        v = tl.load(v_ptr + (v_at[:, None] + channel[None, :]), mask=inside[:, None] & deep[None, :], other=0.0)
        out = tl.dot(weight.to(v.dtype), v, out * kept[:, None], input_precision="ieee")
        top = higher
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + place[:, None] * C + channel[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & deep[None, :])
    if SPLITS > 1:
        tl.store(lse_ptr + place, top + tl.log2(total), mask=live)


def _join_kernel(
    parts_ptr,
    lse_ptr,
    out_ptr,
    num_out,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The splits of one query of one head, weighted by their sums."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    channel = tl.arange(0, BLOCK_C)
    lse = tl.load(lse_ptr + split * num_out + place, mask=split < SPLITS, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    used = (lse != float("-inf"))[:, None] & (channel < C)[None, :]  # other splits have not been written
    part = tl.load(parts_ptr + (split * num_out + place)[:, None] * C + channel[None, :], mask=used, other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + place * C + channel, out.to(out_ptr.dtype.element_ty), mask=channel < C)


# "tiles", "table_row" and "num_out" change from step to step; without this, a kernel would be compiled for each of
# their kinds while serving
SPLIT = Kernel(_split_kernel, changing=["tiles", "table_row", "num_out"])
JOIN = Kernel(_join_kernel, changing=["num_out"])


class Launch(NamedTuple):
    """A batch's cut: query tiles of a sequence, splits of its keys, and the tiles' sizes."""

    tiles: int
    splits: int
    block_m: int
    block_n: int
    block_c: int

    @property
    def num_warps(self) -> int:
        return 8 if self.block_m == _MOST_ROWS or self.block_c > 128 else 4

    @property
    def num_stages(self) -> int:
        return _STAGES if self.block_c <= 256 else _WIDE_STAGES


def plan(*, sequences: int, queries: int, share: int, kv_heads: int, head_dim: int, exact: bool) -> Launch:
    """The cut of `sequences` with at most `queries` queries each, `share` query heads for each of `kv_heads`.

    It depends on no key length and on no width of a page table, so captured and eager steps have the same cut.
    """
    rows = queries * share
    most = _MOST_ROWS if head_dim <= 128 else _MOST_ROWS // 2 if head_dim <= 256 else _MOST_ROWS // 4
    block_m = min(most, _EXACT_ROWS) if exact else min(most, max(16, power_of_two(rows)))
    tiles = -(-rows // block_m)
    most_splits = 1 if exact else max(1, min(_MOST_SPLITS, _PROGRAMS // (sequences * tiles * kv_heads)))
    splits = 1 << (most_splits.bit_length() - 1)  # few different numbers, because each is compiled separately
    block_c = max(16, power_of_two(head_dim))
    # the largest size that leaves all numbers in registers
    block_n = 16 if block_c > 128 else 32 if block_m == _MOST_ROWS else 64
    return Launch(tiles, splits, block_m, block_n, block_c)


def split_attention(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, rows: RowLayout) -> Tensor:
    """`definition.paged_attention` (T, H, C) of a `RowLayout.for_kernels`; `bind` does it for all layers of a step.

    Every shape depends only on the layout's shapes, so a CUDA graph can capture the call. Raises `ValueError` for
    tensors whose channels are not adjacent.
    """
    return bind(rows)(q_THC, k_pages, v_pages)


def bind(rows: RowLayout) -> BoundAttention:
    """`split_attention` of one layout."""
    # The first layer fills these lists for a layout with causal rows, a window or gaps.
    lens: list[Tensor] = []  # the number of keys of each token
    first_keys: list[Tensor] = []  # with a window the first key of each token
    hidden: list[Tensor] = []  # with gaps the first hidden key of each token, and the first key after the gap
    if (rows.window is not None or rows.gap_R is not None) and rows.causal_R is None:
        rows = replace(rows, causal_R=torch.zeros_like(rows.kv_lens_R, dtype=torch.bool))

    def attend(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        if rows.causal_R is not None and not lens:
            lens.append(rows.kv_lens_T(len(q_THC)))
        if rows.window is not None and not first_keys:
            first_keys.append(rows.first_keys_T(len(q_THC)).to(lens[0].dtype))
        if rows.gap_R is not None and not hidden:
            hidden.append(rows.hidden_2T(len(q_THC)).to(lens[0].dtype).contiguous())
        of_tokens = [of_layout[0] if of_layout else None for of_layout in (lens, first_keys, hidden)]
        return _split_attention(q_THC, k_pages, v_pages, rows, *of_tokens)

    return attend


def _split_attention(
    q_THC: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: RowLayout,
    kv_lens_T: Tensor | None,
    first_keys_T: Tensor | None,
    hidden_2T: Tensor | None,
) -> Tensor:
    for name, tensor in (("queries", q_THC), ("keys", k_pages), ("values", v_pages)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"the {name} have strides {tensor.stride()}; make their last dimension contiguous")
    (num_tokens, heads, channels), (page_size, kv_heads) = q_THC.shape, k_pages.shape[1:3]
    assert rows.max_q is not None
    each = 1 if rows.exact else rows.rows_each
    sequences, share = rows.kv_lens_R.shape[0] // each, heads // kv_heads
    cut = plan(
        sequences=sequences,
        queries=each * rows.max_q,
        share=share,
        kv_heads=kv_heads,
        head_dim=channels,
        exact=rows.exact,
    )
    out = torch.empty(q_THC.shape, dtype=q_THC.dtype, device=q_THC.device)
    parts, lse = out, out
    if cut.splits > 1:
        parts = torch.empty((cut.splits, *q_THC.shape), dtype=torch.float32, device=q_THC.device)
        lse = torch.empty((cut.splits, num_tokens, heads), dtype=torch.float32, device=q_THC.device)
    launch(
        SPLIT,
        (sequences * cut.tiles, kv_heads, cut.splits),
        q_THC,
        k_pages,
        v_pages,
        parts,
        lse,
        rows.cu_seqlens_q,
        rows.kv_lens_R if kv_lens_T is None else kv_lens_T,
        rows.kv_lens_R if first_keys_T is None else first_keys_T,
        rows.kv_lens_R if hidden_2T is None else hidden_2T,
        rows.page_table_RP,
        *q_THC.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        rows.page_table_RP.stride(0),
        cut.tiles,
        rows.max_q,
        num_tokens,
        channels**-0.5 * math.log2(math.e),
        EACH=each,
        CAUSAL=kv_lens_T is not None,
        WINDOW=first_keys_T is not None,
        GAP=hidden_2T is not None,
        SHARE=share,
        C=channels,
        PAGE=page_size,
        SPLITS=cut.splits,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_C=cut.block_c,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    if cut.splits > 1:
        launch(
            JOIN,
            (num_tokens * heads,),
            parts,
            lse,
            out,
            num_tokens * heads,
            C=channels,
            SPLITS=cut.splits,
            BLOCK_S=_MOST_SPLITS,
            BLOCK_C=cut.block_c,
        )
    return out
