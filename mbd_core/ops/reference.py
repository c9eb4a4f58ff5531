"""Paged attention in plain torch: the definition of correct, and the CPU engine's kernel.

Block-causality needs no mask. A block attends, without order inside itself, to all keys up to its own end; so each
block is one non-causal row with its own key length, the shape that `flash_attn_varlen_func(..., causal=False)` takes.

Shape legend: T packed query tokens, R rows (one block of one sequence each), P pages a row, S page size, H query
heads, K key/value heads, C head channels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def paged_attention(
    q_THC: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    cu_seqlens_q: Tensor,
    kv_lens_R: Tensor,
    page_table_RP: Tensor,
) -> Tensor:
    """Row r's queries attend to the first `kv_lens_R[r]` keys of its pages, all of them, scaled by C^-1/2.

    `q_THC` holds the rows one after another, bounded by `cu_seqlens_q` (R + 1); `k_pages`, `v_pages` are one layer's
    (pages, S, K, C). Every row needs a key length of at least 1. Returns (T, H, C).
    """
    num_rows = page_table_RP.shape[0]
    lengths = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    longest = -(-q_THC.shape[0] // num_rows)
    uniform = longest * num_rows == q_THC.shape[0] and bool((lengths == longest).all())
    if uniform:
        rows = q_THC.view(num_rows, longest, *q_THC.shape[1:])
    else:
        rows = torch.nn.utils.rnn.pad_sequence(
            [q_THC[a:b] for a, b in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)],
            batch_first=True,
        )
    k = k_pages[page_table_RP].flatten(1, 2).transpose(1, 2)
    v = v_pages[page_table_RP].flatten(1, 2).transpose(1, 2)
    seen = torch.arange(k.shape[2], device=k.device) < kv_lens_R[:, None]
    out = F.scaled_dot_product_attention(
        rows.transpose(1, 2), k, v, attn_mask=seen[:, None, None], enable_gqa=q_THC.shape[1] != k.shape[1]
    ).transpose(1, 2)
    if uniform:
        return out.reshape(q_THC.shape)
    return torch.cat([row[:n] for row, n in zip(out, lengths.tolist(), strict=True)])
