"""A buffer's attention with the prefix read once: prefix and in-buffer parts merged by their log-sum-exp.

Taken as separate rows, the N slots of a sequence read its prefix N times. Here all slots read together the whole pages
that slot 0 sees, and each reads the rest (its predecessors and itself) alone:

    keys     | slot 0's whole pages      | slot 0 | slot 1 | slot 2 |
    slot 0   | one call of N slots       |  own   |        |        |
    slot 1   |                           |  own call ------|        |
    slot 2   |                           |  own call ---------------|

    w = e^lse_1 / (e^lse_1 + e^lse_2)        out = w out_1 + (1 - w) out_2

Shape legend: T packed query tokens, G sequences, N slots of each, R = G * N rows, B tokens a slot (T = R * B), P pages
a row, S page size, H query heads, C head channels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mbd_core.ops.row_layout import RowLayout

BoundAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""One layer's queries (T, H, C), key pages and value pages -> (T, H, C), for a batch laid out already."""

BoundLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same, and the log-sum-exp of every query's scaled scores, float32 (T, H)."""


def bind_merged(bind_lse: Callable[[RowLayout], BoundLse], layout: RowLayout, *, slots: int) -> BoundAttention:
    """Attention of whole buffers: rows of `max_q` queries, `slots` to a sequence and with the same pages.

    Slot n sees n blocks more than slot 0; an unused slot sees at most the keys of a buffer, which it reads by itself.
    Static shapes and no host reads of its own: fit for a graph if `bind_lse` is. Raises `ValueError` if the rows do
    not divide into sequences, without `max_q`, and with `exact`.
    """
    block_size, kv_lens_R, page_table_RP = layout.max_q, layout.kv_lens_R, layout.page_table_RP
    num_rows, width = page_table_RP.shape
    if num_rows % slots:
        raise ValueError(f"{num_rows} rows do not divide into buffers of {slots} slots")
    if layout.exact:
        raise ValueError(f"merge_slots={slots} cannot be exact: merged parts round differently; leave it out")
    if block_size is None:
        raise ValueError(f"merge_slots={slots} needs max_q, the tokens of a slot")
    shared_G = kv_lens_R[::slots] // layout.page_size * layout.page_size
    shared_R = shared_G.repeat_interleave(slots)
    shares_R = (kv_lens_R >= shared_R) & (shared_R > 0)
    first_page_R = torch.where(shares_R, shared_R // layout.page_size, 0)
    rest_R = kv_lens_R - first_page_R * layout.page_size
    rest_width = min(width, 1 + -(-slots * block_size // layout.page_size))
    pages = torch.arange(rest_width, device=page_table_RP.device)
    # A part without keys still runs, on one key that then counts for nothing: a kernel's answer to none is its own.
    attend_prefix = bind_lse(
        replace(
            layout,
            cu_seqlens_q=layout.cu_seqlens_q[::slots].contiguous(),
            kv_lens_R=shared_G.clamp(min=1),
            page_table_RP=page_table_RP[::slots],
            max_q=slots * block_size,
        )
    )
    attend_rest = bind_lse(
        replace(
            layout,
            kv_lens_R=rest_R.clamp(min=1),
            page_table_RP=page_table_RP.gather(1, (first_page_R[:, None] + pages).clamp(max=width - 1).long()),
        )
    )
    only_R = torch.zeros(num_rows, device=kv_lens_R.device)
    only_R = only_R.masked_fill(rest_R == 0, torch.inf).masked_fill(~shares_R, -torch.inf)
    only_T1 = only_R.repeat_interleave(block_size)[:, None]

    def attend(q_THC: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        prefix_THC, prefix_lse_TH = attend_prefix(q_THC, k_pages, v_pages)
        rest_THC, rest_lse_TH = attend_rest(q_THC, k_pages, v_pages)
        weight_TH1 = (prefix_lse_TH - rest_lse_TH + only_T1).sigmoid()[..., None]
        return torch.lerp(rest_THC.float(), prefix_THC.float(), weight_TH1).to(q_THC.dtype)

    return attend


@dataclass(frozen=True, kw_only=True)
class MergeRule:
    """Whether merging is faster, from measurements on one machine.

    merge_from   by sequences and slots: the prefix (tokens) from which on it is; none where it never is
    measured_at  where that comes from
    """

    merge_from: dict[tuple[int, int], int | None]
    measured_at: str

    def merges(self, *, num_sequences: int, slots: int, longest_prefix: int) -> bool:
        """The answer measured for these slots at the most sequences that are not more, else at the fewest measured.

        One slot has nothing to merge, and slots that were not measured are attended as rows.
        """
        measured = sorted(sequences for sequences, n in self.merge_from if n == slots)
        if slots == 1 or not measured:
            return False
        nearest = max((m for m in measured if m <= num_sequences), default=measured[0])
        threshold = self.merge_from[nearest, slots]
        return threshold is not None and longest_prefix >= threshold

    def describe(self) -> str:
        parts = [
            f"{'never' if prefix is None else f'from prefix {prefix}'} at {sequences} x {slots} slots"
            for (sequences, slots), prefix in sorted(self.merge_from.items())
        ]
        return f"prefix read once {', '.join(parts)} ({self.measured_at})"
