"""Flash-attention kernels of other packages, with one signature.

Each kernel takes rows of varying length over a paged cache; `max_k` may exceed every row's key length. The packages
differ in how they take the key lengths.

In all packages a call is causal for all rows or for none. A layout with causal rows takes two calls, one of each kind.
In the call of its kind a row has all its keys, in the other call one key. Then each token's result is taken from its
row's call. So the shapes do not depend on the choice of causal rows, and the keys are still read once.

Shape legend: T packed query tokens, R rows, P pages a row, S page size, H query heads, K key/value heads, C channels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.ops.attention.definition import BoundAttention, RowLayout

FlashKernel = Callable[[RowLayout], BoundAttention]
"""A function from `RowLayout.for_kernels` to its attention; it computes once the part that all layers share."""


class UniformKernel(Protocol):
    """A kernel whose rows are all causal, or all not."""

    def __call__(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: RowLayout, *, causal: bool) -> Tensor: ...


def by_rows(kernel: UniformKernel) -> FlashKernel:
    """The kernel in which each row may be causal or not."""

    def bind(rows: RowLayout) -> BoundAttention:
        if rows.causal_R is None:
            return lambda q, k, v: kernel(q, k, v, rows, causal=False)
        plain = replace(rows, kv_lens_R=rows.kv_lens_R.masked_fill(rows.causal_R, 1))
        ordered = replace(rows, kv_lens_R=rows.kv_lens_R.masked_fill(~rows.causal_R, 1))
        tokens: list[Tensor] = []  # marks tokens in causal rows, (T, 1, 1), from the first layer on

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert rows.causal_R is not None
            if not tokens:
                causal_T = rows.causal_R.repeat_interleave(rows.cu_seqlens_q.diff(), output_size=len(q))
                tokens.append(causal_T[:, None, None])
            in_order = kernel(q, k, v, ordered, causal=True)
            return torch.where(tokens[0], in_order, kernel(q, k, v, plain, causal=False))

        return attend

    return bind


def torch_varlen(varlen_attn: Callable[..., Any]) -> FlashKernel:
    """`torch.nn.attention.varlen.varlen_attn` with a block table, which runs FlashAttention 3 or 4."""

    def kernel(q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: RowLayout, *, causal: bool) -> Tensor:
        out: Tensor = varlen_attn(
            q,
            k_pages,
            v_pages,
            rows.cu_seqlens_q,
            None,
            rows.max_q,
            rows.max_k,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=q.shape[1] != k_pages.shape[2],
            seqused_k=rows.kv_lens_R,
            block_table=rows.page_table_RP,
            num_splits=1 if rows.exact else None,
        )
        return out

    return by_rows(kernel)


def vllm_flash(flash_attn_varlen_func: Callable[..., Any], *, fa_version: int) -> FlashKernel:
    """`vllm.vllm_flash_attn`, which takes the key lengths themselves."""

    def kernel(q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: RowLayout, *, causal: bool) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q=q,
            k=k_pages,
            v=v_pages,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.max_q,
            seqused_k=rows.kv_lens_R,
            max_seqlen_k=rows.max_k,
            block_table=rows.page_table_RP,
            causal=causal,
            num_splits=1 if rows.exact else 0,
            fa_version=fa_version,
        )
        return out

    return by_rows(kernel)


def flash_3(flash_attn_with_kvcache: Callable[..., Any]) -> FlashKernel:
    """FlashAttention 3 from its own packages, in which only `flash_attn_with_kvcache` takes pages."""

    def kernel(q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: RowLayout, *, causal: bool) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            q=q,
            k_cache=k_pages,
            v_cache=v_pages,
            cache_seqlens=rows.kv_lens_R,
            page_table=rows.page_table_RP,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.max_q,
            causal=causal,
            num_splits=1 if rows.exact else 0,
        )
        return out

    return by_rows(kernel)


def flash_2(flash_attn_varlen_func: Callable[..., Any]) -> FlashKernel:
    """`flash_attn` 2.x, which with a block table takes the key lengths as cumulative sums.

    It splits a row's keys only if every row is a single query. In all other batches a row's result does not depend
    on the other rows, so `exact` changes nothing.
    """

    def kernel(q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: RowLayout, *, causal: bool) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q=q,
            k=k_pages,
            v=v_pages,
            cu_seqlens_q=rows.cu_seqlens_q,
            cu_seqlens_k=F.pad(rows.kv_lens_R.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=rows.max_q,
            max_seqlen_k=rows.max_k,
            block_table=rows.page_table_RP,
            causal=causal,
        )
        return out

    return by_rows(kernel)
