"""Paged attention by rows in plain torch: the rows' layout, and the definition that kernels are tested against.

Block-causality needs no mask. A block attends, without order inside itself, to all keys up to its own end; so each
block is one non-causal row with its own key length, the shape that `flash_attn_varlen_func(..., causal=False)` takes.
A row may also be causal inside: each of its queries then sees one key more than the query before it.

Shape legend: T packed query tokens, R rows (one block of one sequence each), P pages a row, S page size, H query
heads, K key/value heads, C head channels; in one call G sequences, Q query tokens of each, L keys of each.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

BoundAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""One layer's queries (T, H, C), key and value pages (pages, S, K, C) -> (T, H, C), for the rows of one layout."""


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """A batch of rows. All queries of row r attend to the first `kv_lens_R[r]` keys of its pages.

    In a causal row only the last query does; each other query sees one key less than its successor.

    cu_seqlens_q   the first query of each row among the packed queries, and the end of the last row (R + 1)
    kv_lens_R      number of keys of each row; at least 1 for a row with queries
    page_table_RP  each row's pages; the entries after a row's pages must be valid page numbers too
    page_size      tokens a page
    causal_R       marks rows that are causal inside, bool; `None`: no row. A causal row has no more queries than keys
    window         in a causal row a query sees itself and the last `window - 1` keys before it; in another row it sees
                   the row's keys and the last `window - 1` keys before the row. No row then has more queries than
                   keys. `None`: all keys
    gap_R          the number of hidden keys directly before a query's own keys, because the row's keys are stored that
                   many places after their positions. A query's own keys are its own key in a causal row, otherwise
                   the keys of all the row's queries. `None`: no row has a gap. Never with a `window`
    max_q          queries of the longest row, for kernels that need it on the host; `None`: `for_kernels` finds it
    exact          each row's result must be bitwise independent of the other rows
    rows_each      number of neighbouring rows, of `max_q` queries each, that belong to one sequence and have the same
                   pages, throughout the batch. A kernel that reads a sequence's keys only once needs this number
    """

    cu_seqlens_q: Tensor
    kv_lens_R: Tensor
    page_table_RP: Tensor
    page_size: int
    causal_R: Tensor | None = None
    window: int | None = None
    gap_R: Tensor | None = None
    max_q: int | None = None
    exact: bool = False
    rows_each: int = 1

    @property
    def max_k(self) -> int:
        """The number of keys that a row of the page table can hold."""
        return self.page_table_RP.shape[1] * self.page_size

    def kv_lens_T(self, num_tokens: int) -> Tensor:
        """The number of visible keys of each of the `num_tokens` queries, for a layout with `causal_R`."""
        assert self.causal_R is not None
        rows = torch.arange(len(self.kv_lens_R), device=self.kv_lens_R.device)
        row_T = rows.repeat_interleave(self.cu_seqlens_q.diff(), output_size=num_tokens)
        after_T = self.cu_seqlens_q[1:][row_T] - 1 - torch.arange(num_tokens, device=row_T.device)
        return (self.kv_lens_R[row_T] - self.causal_R[row_T] * after_T).to(self.kv_lens_R.dtype)

    def first_keys_T(self, num_tokens: int) -> Tensor:
        """The first visible key of each of the `num_tokens` queries, for a layout with a `window`."""
        assert self.window is not None
        lengths_R = self.cu_seqlens_q.diff()
        before_R = self.kv_lens_R - lengths_R
        before_T = before_R.repeat_interleave(lengths_R, output_size=num_tokens)
        if self.causal_R is not None:
            causal_T = self.causal_R.repeat_interleave(lengths_R, output_size=num_tokens)
            before_T = torch.where(causal_T, self.kv_lens_T(num_tokens) - 1, before_T)
        return (before_T - (self.window - 1)).clamp(min=0)

    def hidden_2T(self, num_tokens: int) -> Tensor:
        """For each of the `num_tokens` queries of a layout with `gap_R`, the first hidden key and the first key after
        the hidden keys; both are equal if no key is hidden from the query."""
        assert self.gap_R is not None
        own_R = self.cu_seqlens_q.diff()
        if self.causal_R is not None:
            own_R = own_R.masked_fill(self.causal_R, 1)
            ends_T = self.kv_lens_T(num_tokens)
        else:
            ends_T = self.kv_lens_R.repeat_interleave(self.cu_seqlens_q.diff(), output_size=num_tokens)
        gap_2R = torch.stack((self.gap_R + own_R, own_R)).where(self.gap_R > 0, 0)
        gap_2T = gap_2R.repeat_interleave(self.cu_seqlens_q.diff(), dim=1, output_size=num_tokens)
        return (ends_T - gap_2T).to(ends_T.dtype)

    def for_kernels(self) -> "RowLayout":
        """The same layout in flash kernels' form: int32, the table contiguous, `max_q` on the host.

        Without `max_q` the longest row is read back from the device, which a CUDA graph cannot capture.
        """
        return replace(
            self,
            cu_seqlens_q=self.cu_seqlens_q.int(),
            kv_lens_R=self.kv_lens_R.int(),
            page_table_RP=self.page_table_RP.int().contiguous(),
            max_q=int(self.cu_seqlens_q.diff().max()) if self.max_q is None else self.max_q,
        )


def paged_attention(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor, layout: RowLayout) -> Tensor:
    """Row r's queries attend to the keys of its pages that the layout makes visible, scaled by C^-1/2.

    `q_THC` holds the rows one after another; `k_pages`, `v_pages` are one layer's (pages, S, K, C). Returns (T, H, C).
    """
    return bind_rows(layout)(q_THC, k_pages, v_pages)


def bind_rows(layout: RowLayout) -> BoundAttention:
    """`paged_attention` of one layout, whose row lengths are read once for all layers.

    Each row is a call of its own over exactly its keys, its operands freshly laid out. The same row therefore gives
    the same bits in any batch.
    """
    bounds, kv_lens = layout.cu_seqlens_q.tolist(), layout.kv_lens_R.tolist()
    page_table_RP, page_size = layout.page_table_RP, layout.page_size
    causal = [False] * len(kv_lens) if layout.causal_R is None else layout.causal_R.tolist()
    gaps = [0] * len(kv_lens) if layout.gap_R is None else layout.gap_R.tolist()

    def attend_rows(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        out_THC = torch.empty_like(q_THC)
        for row, num_keys in enumerate(kv_lens):
            start, stop = bounds[row], bounds[row + 1]
            if start == stop:
                continue
            pages_GP = page_table_RP[row : row + 1, : -(-num_keys // page_size)]
            k_GKLC, v_GKLC = gather_keys(k_pages, v_pages, pages_GP, num_keys)
            mask_GQL = row_mask(
                stop - start,
                num_keys,
                causal=causal[row],
                window=layout.window,
                gap=gaps[row],
                device=q_THC.device,
            )
            out_THC[start:stop] = attend(q_THC[None, start:stop].clone(), k_GKLC, v_GKLC, mask_GQL)[0]
        return out_THC

    return attend_rows


def row_mask(
    num_queries: int, num_keys: int, *, causal: bool, window: int | None, gap: int = 0, device: torch.device
) -> Tensor | None:
    """The visible keys of each query of a row, (1, Q, L); `None` if all queries see all keys."""
    if window is None and not gap and (not causal or num_queries == 1):
        return None
    before, keys_L = num_keys - num_queries, torch.arange(num_keys, device=device)
    own_Q = keys_L[before:]  # the key of each query itself
    sees_QL = keys_L <= (own_Q if causal else own_Q[-1:])[:, None]
    if window is not None:
        sees_QL = sees_QL & (keys_L > (own_Q if causal else own_Q[:1])[:, None] - window)
    if gap:
        first_own_Q = (own_Q if causal else own_Q[:1])[:, None]
        sees_QL = sees_QL & ((keys_L < first_own_Q - gap) | (keys_L >= first_own_Q))
    return sees_QL.expand(num_queries, num_keys)[None]


def gather_keys(k_pages: Tensor, v_pages: Tensor, pages_GP: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """The first `num_keys` keys and values of each sequence, (G, K, L, C)."""
    shape = (*pages_GP.shape, *k_pages.shape[1:])  # index_select takes a fraction of the time of indexing by a tensor
    k, v = (pages.index_select(0, pages_GP.flatten()).view(shape) for pages in (k_pages, v_pages))
    return k.flatten(1, 2)[:, :num_keys].transpose(1, 2), v.flatten(1, 2)[:, :num_keys].transpose(1, 2)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a CPU attends: float32 for narrower dtypes."""
    return torch.promote_types(x.dtype, torch.float32)


def attend(q_GQHC: Tensor, k_GKLC: Tensor, v_GKLC: Tensor, mask_GQL: Tensor | None = None) -> Tensor:
    """Attention (G, Q, H, C) of each sequence's queries over its keys; without a mask, over all of its keys.

    Keys are never copied for each query head. The CPU's kernel pairs query heads with key heads itself; in bfloat16 it
    takes up to eight times as long as in float32. Elsewhere the query heads of one key head are stacked along the
    queries, which is correct because the queries have no order.
    """
    queries, heads = q_GQHC.shape[1:3]
    if q_GQHC.device.type == "cpu":
        mask = None if mask_GQL is None else mask_GQL[:, None]
        q, k, v = (x.to(wide_dtype(x)) for x in (q_GQHC.transpose(1, 2), k_GKLC, v_GKLC))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.to(q_GQHC.dtype).transpose(1, 2)
    kv_heads = k_GKLC.shape[1]
    share = heads // kv_heads
    q = q_GQHC.unflatten(2, (kv_heads, share)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = None if mask_GQL is None else torch.cat([mask_GQL] * share, dim=1)[:, None]
    out = F.scaled_dot_product_attention(q, k_GKLC, v_GKLC, attn_mask=mask)
    return out.unflatten(2, (share, queries)).permute(0, 3, 1, 2, 4).reshape(q_GQHC.shape)
