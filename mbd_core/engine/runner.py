"""Runs the model on a batch: embeddings, layers with paged attention, and logits where they are asked for.

Shape legend: R sequences, T packed tokens, A positions asked for, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.engine.batch import Batch, to_device
from mbd_core.engine.pages import PagedKVCache
from mbd_core.models.decoder import Decoder, Reduce
from mbd_core.models.fused import fuse
from mbd_core.models.lora import AdapterSlots
from mbd_core.models.shard import Shard
from mbd_core.ops.attention.choice import AttentionKernel
from mbd_core.ops.attention.definition import BoundAttention, RowLayout
from mbd_core.ops.layer.confidence import confidence, part_confidence


@dataclass(frozen=True)
class PagedAttention:
    """The `Attend` of a paged forward: store this batch's keys, then attend through the page table."""

    cache: PagedKVCache
    write_loc_T: Tensor
    attend: BoundAttention

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, k, v, self.write_loc_T)
        return self.attend_stored(layer, q)

    def places(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's keys and values by location, and the location of each token: for kernels that write themselves."""
        return *self.cache.by_location[layer], self.write_loc_T

    def attend_stored(self, layer: int, q: Tensor) -> Tensor:
        """Attend, this batch's keys being stored."""
        return self.attend(q, *self.cache.layers[layer])


class ModelRunner:
    """Runs the decoder over batches: its fused form, or, for batch-invariant rows, the decoder itself, row by row.
    `adapters` are the slots of LoRA adapters, if the engine has any.

    Positions must lie below `num_positions`. Models whose logits predict the next position need the hidden state of
    the position before a block; the runner remembers the last committed position's for each of `num_rows` batch rows.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        attention: AttentionKernel,
        *,
        num_rows: int,
        num_positions: int,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.model, self.cache, self.attention, self.adapters = model, cache, attention, adapters
        self._fused = fuse(model, num_positions=num_positions)
        weights = model.model.norm.weight
        self.last_batch: Batch | None = None  # after a replay: the batch that the replay has filled
        self._hidden_TD = weights.new_zeros((0, model.config.hidden_size))
        self.last_RD = weights.new_zeros((num_rows, model.config.hidden_size))

    def bind(self, batch: Batch) -> BoundAttention:
        """The batch's attention, laid out for all layers."""
        layout = RowLayout(
            cu_seqlens_q=batch.cu_seqlens_q,
            kv_lens_R=batch.kv_lens_K,
            page_table_RP=batch.pages_KP,
            page_size=self.cache.page_size,
            causal_R=batch.causal_K,
            max_q=batch.max_q,
            exact=batch.split is not None,
            rows_each=batch.rows_each,
        )
        return self.attention.bind(layout)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Final hidden states (A, D) of the positions that are asked for."""
        self.last_batch = batch
        paged = PagedAttention(self.cache, batch.write_loc_T, self.bind(batch))
        ids_T, positions_T, weight_T = batch.input_ids_T, batch.positions_T, batch.weight_T
        adapters = None
        if batch.adapter_T is not None:
            assert self.adapters is not None
            adapters = self.adapters.choose(batch.adapter_T)
        if batch.split is None:
            hidden = self._fused.forward(
                ids_T, positions_T, paged, soft_weight=weight_T, adapters=adapters, live=batch.live_T
            )
        else:
            hidden = self.model(ids_T, positions_T, paged, soft_weight=weight_T, split=batch.split, adapters=adapters)
        self._hidden_TD = hidden
        if self.model.config.shift_logits:
            hidden = torch.cat((hidden, self.last_RD))
        return hidden if batch.logits_at_A is None else hidden.index_select(0, batch.logits_at_A)

    def forget_batch(self) -> None:
        """Let go of the last forward's tensors, which may lie in a graph's memory."""
        self.last_batch, self._hidden_TD = None, self._hidden_TD.new_zeros((0, self._hidden_TD.shape[1]))

    @property
    def has_kernel_layers(self) -> bool:
        """Whether some layer runs by Triton kernels, where rows are not computed apart."""
        return self._fused.has_kernel_layers

    def weights_changed(self) -> None:
        """The decoder's weights were overwritten in place."""
        self._fused.refresh()

    @torch.inference_mode()
    def logits(self, hidden_AD: Tensor, *, split: Sequence[int] | None = None) -> Tensor:
        """Logits (A, V), raw: a position's own row; `split` computes runs of rows apart. Ranks call it together."""
        return self.model.logits(hidden_AD, split=split)

    @torch.inference_mode()
    def own_logits(self, hidden_AD: Tensor, *, split: Sequence[int] | None = None) -> Tensor:
        """The logits of this rank's part of the vocabulary; `split` as in `logits`."""
        return self.model.own_logits(hidden_AD, split=split)

    def blockwise_logits(
        self, hidden_AD: Tensor, batch: Batch, *, block_size: int, whole: bool
    ) -> Callable[[slice], Tensor]:
        """The logits of a range of `hidden_AD`; in a batch-invariant batch, ranges are whole blocks, each apart.

        Unless `whole`, they are those of this rank's part of the vocabulary.
        """
        head = self.logits if whole else self.own_logits

        def of(part: slice) -> Tensor:
            blocks = (part.stop - part.start) // block_size
            return head(hidden_AD[part], split=None if batch.split is None else [block_size] * blocks)

        return of

    def remember_prompts(self, ends: Sequence[tuple[int, int]]) -> None:
        """Keep the last forward's hidden states at (batch row, packed token), where prefixes end."""
        if ends and self.model.config.shift_logits:
            rows, at = to_device(ends, self._hidden_TD.device).T
            self.last_RD[rows] = self._hidden_TD[at]

    def remember_committed(self, slot_end_RN: Tensor | None, num_blocks_R: Tensor) -> None:
        """Keep the last forward's hidden state of every batch row that committed blocks, at the last token of the last
        of them; static shapes."""
        if slot_end_RN is None or not self.model.config.shift_logits:
            return
        last = (num_blocks_R - 1).clamp(min=0)
        at_R = slot_end_RN.gather(1, last[:, None])[:, 0]
        kept = self.last_RD[: len(at_R)]
        kept.copy_(torch.where((num_blocks_R > 0)[:, None], self._hidden_TD[at_R], kept))


# The vocabulary where its logits are: read once on a GPU, and in parts where ranks share it.
#
# A greedy step needs of each position the likeliest token and its probability. Of a rank's part of the vocabulary
# three numbers a position say all that the other ranks must know, so they cross instead of the logits.
#
# Shape legend: P positions, V vocabulary or a rank's part of it, G ranks.


class FusedVocab(Vocab):
    """`Vocab` for logits on a GPU: they are read once."""

    def likeliest(self, logits_PV: Tensor) -> tuple[Tensor, Tensor]:
        return confidence(logits_PV, mask_token_id=self.mask_token_id, size=self.size)


@dataclass(frozen=True)
class PartVocab(Vocab):
    """`Vocab` where ranks share its logits: all call `likeliest` together, and get the same answer to the bit.

    It takes the logits of this rank's `part` of the ids, or all of them, and reads its part in both: the answer does
    not depend on which.

    reduce  sums a tensor over the ranks
    fused   the logits are on a GPU: they are read once
    """

    part: range
    shard: Shard
    reduce: Reduce
    fused: bool

    def likeliest(self, logits_PV: Tensor) -> tuple[Tensor, Tensor]:
        if logits_PV.shape[-1] != len(self.part):
            logits_PV = logits_PV[:, self.part.start : self.part.stop]
        place_P, logit_P, lse_P = self._own(logits_PV)
        # Token ids are below 2^24, so exact in float32; a sum with zeros changes nothing.
        shared_G3P = logit_P.new_zeros((self.shard.size, 3, len(logit_P)))
        torch.stack(((place_P + self.part.start).float(), logit_P, lse_P), out=shared_G3P[self.shard.rank])
        token_GP, logit_GP, lse_GP = self.reduce(shared_G3P).unbind(1)
        best_P = logit_GP.amax(0)
        # The lowest id among equals; where all are NaN, none is equal, and any id in range will do.
        token_P = torch.where(logit_GP == best_P, token_GP, torch.inf).amin(0).clamp(max=self.size - 1)
        return token_P.long(), (best_P - lse_GP.logsumexp(0)).exp()

    def _own(self, logits_PV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`part_confidence`."""
        mask, size = self.mask_token_id - self.part.start, self.size - self.part.start
        if self.fused:
            return part_confidence(logits_PV, mask_token_id=mask, size=size)
        wide_PV = logits_PV.float()
        ids_V = torch.arange(wide_PV.shape[-1], device=wide_PV.device)
        barred_V = (ids_V == mask) | (ids_V >= size)
        logit_P, place_P = wide_PV.masked_fill(barred_V, -torch.inf).max(dim=-1)
        return place_P, logit_P, wide_PV.logsumexp(-1)


def whole_vocab(model: Decoder, size: int) -> Vocab:
    """For logits of the whole vocabulary of `model`, read by one rank alone: ids from `size` on are padding."""
    on_gpu = model.lm_head.weight.device.type == "cuda"
    return (FusedVocab if on_gpu else Vocab)(model.config.mask_token_id, size)


def shared_vocab(model: Decoder, size: int) -> Vocab:
    """For logits that all ranks of `model` read together; of one rank, `whole_vocab`."""
    if model.reduce is None:
        return whole_vocab(model, size)
    return PartVocab(
        model.config.mask_token_id,
        size,
        part=model.vocabulary,
        shard=model.shard,
        reduce=model.reduce,
        fused=model.lm_head.weight.device.type == "cuda",
    )
