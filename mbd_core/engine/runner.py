"""One forward: from the plan's blocks to logits at the positions that are asked for.

Everything in a batch is a whole block, so a batch is a list of block rows: a prompt block to be stored, or a slot.

Shape legend: R block rows, B block size, T = R * B packed tokens, P pages a row, C head channels, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.kvcache.cache import PagedKVCache
from mbd_core.models.decoder import Decoder
from mbd_core.ops.reference import paged_attention


@dataclass(frozen=True)
class Batch:
    """What one forward needs. `write_loc_T` points to the null page where nothing is to be stored."""

    input_ids_T: Tensor
    positions_T: Tensor
    cu_seqlens_q: Tensor
    kv_lens_R: Tensor
    page_table_RP: Tensor
    write_loc_T: Tensor
    logits_at: Tensor


def build_batch(
    *,
    tokens_RB: Tensor,
    blocks_R: Tensor,
    page_table_RP: Tensor,
    stored_R: Tensor,
    seen_blocks_R: Tensor,
    page_size: int,
    logits_at: Tensor,
) -> Batch:
    """Lay out block rows: block `blocks_R[r]` of the sequence whose pages are `page_table_RP[r]`.

    `stored_R` says whether the row's keys are kept, `seen_blocks_R` how many blocks it attends to (its own included),
    `logits_at` which packed tokens get logits.
    """
    rows, size = tokens_RB.shape
    positions = blocks_R[:, None] * size + torch.arange(size, device=tokens_RB.device)
    page = page_table_RP.gather(1, (positions // page_size).clamp(max=page_table_RP.shape[1] - 1))
    locations = torch.where(stored_R[:, None], page * page_size + positions % page_size, positions % page_size)
    return Batch(
        input_ids_T=tokens_RB.flatten(),
        positions_T=positions.flatten(),
        cu_seqlens_q=torch.arange(0, (rows + 1) * size, size, dtype=torch.int32, device=tokens_RB.device),
        kv_lens_R=(seen_blocks_R * size).clamp(min=1),
        page_table_RP=page_table_RP,
        write_loc_T=locations.flatten(),
        logits_at=logits_at,
    )


@dataclass(frozen=True)
class PagedAttention:
    """The `Attend` of a paged forward: store this batch's keys, then attend through the page table."""

    cache: PagedKVCache
    batch: Batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, k, v, self.batch.write_loc_T)
        return paged_attention(
            q,
            self.cache.k[layer],
            self.cache.v[layer],
            cu_seqlens_q=self.batch.cu_seqlens_q,
            kv_lens_R=self.batch.kv_lens_R,
            page_table_RP=self.batch.page_table_RP,
        )


class EagerRunner:
    """Runs the model on a batch, kernel by kernel."""

    def __init__(self, model: Decoder, cache: PagedKVCache) -> None:
        self.model, self.cache = model, cache

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Float32 logits (len(logits_at), V)."""
        hidden = self.model(batch.input_ids_T, batch.positions_T, PagedAttention(self.cache, batch))
        return self.model.logits(hidden[batch.logits_at])
