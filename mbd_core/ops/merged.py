"""A buffer's attention with the prefix read once: prefix and in-buffer parts merged by their log-sum-exp.

Taken as separate rows, the N slots of a sequence read its prefix N times. Here all slots read together the whole pages
that every one of them sees, and each reads the rest (its predecessors and itself) alone:

    keys     | shared whole pages        | slot 0 | slot 1 | slot 2 |
    slot 0   | one call of N slots       |  own   |        |        |
    slot 1   |                           |  own call ------|        |
    slot 2   |                           |  own call ---------------|

    out = (e^lse_1 out_1 + e^lse_2 out_2) / (e^lse_1 + e^lse_2)

Shape legend: T packed query tokens, G sequences, N rows of each, R = G * N rows, P pages a row, S page size, H query
heads, C head channels.
"""

from typing import Protocol

import torch
from torch import Tensor

from mbd_core.ops.reference import paged_attention_lse


class PagedAttentionLse(Protocol):
    """Paged attention that also gives the log-sum-exp of its scores, float32 (T, H)."""

    def __call__(
        self,
        q_THC: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        cu_seqlens_q: Tensor,
        kv_lens_R: Tensor,
        page_table_RP: Tensor,
        max_q: int | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def prefix_merged_attention(
    q_THC: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    cu_seqlens_q: Tensor,
    kv_lens_R: Tensor,
    page_table_RP: Tensor,
    rows_per_sequence: int,
    attend_lse: PagedAttentionLse = paged_attention_lse,
    max_q: int | None = None,
) -> Tensor:
    """`paged_attention` (T, H, C) of rows that come `rows_per_sequence` to a sequence, with the same pages.

    Static shapes, no host reads of its own: fit for a graph if `attend_lse` is. Raises `ValueError` if the rows do not
    divide into sequences.
    """
    num_rows, width = page_table_RP.shape
    if num_rows % rows_per_sequence:
        raise ValueError(f"{num_rows} rows do not divide into sequences of rows_per_sequence={rows_per_sequence}")
    size = k_pages.shape[1]
    shared_G = kv_lens_R.view(-1, rows_per_sequence).amin(1) // size * size
    shared_R = shared_G.repeat_interleave(rows_per_sequence)
    rest_R = kv_lens_R - shared_R
    first_page_R = (shared_R // size)[:, None]
    rest_table_RP = page_table_RP.gather(
        1, (first_page_R + torch.arange(width, device=q_THC.device)).clamp(max=width - 1).long()
    )
    # A part without keys still runs, on one key that then counts for nothing: a kernel's answer to none is its own.
    prefix_THC, prefix_lse_TH = attend_lse(
        q_THC,
        k_pages,
        v_pages,
        cu_seqlens_q=cu_seqlens_q[::rows_per_sequence].contiguous(),
        kv_lens_R=shared_G.clamp(min=1),
        page_table_RP=page_table_RP[::rows_per_sequence].contiguous(),
        max_q=None if max_q is None else max_q * rows_per_sequence,
    )
    rest_THC, rest_lse_TH = attend_lse(
        q_THC,
        k_pages,
        v_pages,
        cu_seqlens_q=cu_seqlens_q,
        kv_lens_R=rest_R.clamp(min=1),
        page_table_RP=rest_table_RP,
        max_q=max_q,
    )
    lengths_R = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
    row_T = torch.arange(num_rows, device=q_THC.device).repeat_interleave(lengths_R, output_size=q_THC.shape[0])
    lse_2TH = torch.stack((prefix_lse_TH, rest_lse_TH))
    none_2T = torch.stack((shared_R == 0, rest_R == 0))[:, row_T]
    weight_2TH = lse_2TH.masked_fill(none_2T[..., None], -torch.inf).softmax(0)[..., None]
    return (prefix_THC * weight_2TH[0] + rest_THC * weight_2TH[1]).to(q_THC.dtype)
