"""The model on a batch: embeddings, layers with paged attention, logits at the asked positions.

Shape legend: T packed tokens, A positions asked for, R batch rows, N slots, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mbd_core.engine.memory.pages import PagedKVCache
from mbd_core.engine.step.batch import Batch, to_device
from mbd_core.models.decoder import Decoder
from mbd_core.models.fused import fuse
from mbd_core.models.lora import AdapterSlots
from mbd_core.ops.attention.choice import AttentionKernel
from mbd_core.ops.attention.definition import BoundAttention, RowLayout


@dataclass(frozen=True)
class PagedAttention:
    """The `Attend` of a paged forward: it stores this batch's keys, then attends through the page table, with the
    layer's function of `attends`."""

    cache: PagedKVCache
    write_loc_T: Tensor
    attends: Sequence[BoundAttention]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, k, v, self.write_loc_T)
        return self.attend_stored(layer, q)

    def places(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's keys and values by location, and the location of each token: for kernels that write themselves."""
        return *self.cache.by_location[layer], self.write_loc_T

    def attend_stored(self, layer: int, q: Tensor) -> Tensor:
        """Attends after this batch's keys are stored."""
        return self.attends[layer](q, *self.cache.layers[layer])


class ModelRunner:
    """Runs the decoder over batches: in its fused form, or row by row in its plain form for batch-invariant rows.
    Gemma's layers have no fused form. `adapters` are the slots of LoRA adapters, if the engine has any.

    Positions must lie below `num_positions`. Models whose logits predict the next position need the hidden state of
    the position before a block. So the runner remembers it for each of `num_rows` batch rows.
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
        c = model.config
        self._windows = [c.window_of(layer) for layer in range(c.num_layers)]
        self._fused_decoder = fuse(model, num_positions=num_positions) if c.gemma is None else None
        weights = model.model.norm.weight
        self.last_batch: Batch | None = None  # after a replay: the batch that the replay has filled
        self._hidden_TD = weights.new_zeros((0, model.config.hidden_size))
        self.last_RD = weights.new_zeros((num_rows, model.config.hidden_size))

    def bind(self, batch: Batch) -> PagedAttention:
        """The batch's attention; layers that see the same keys share a layout."""
        layout = RowLayout(
            cu_seqlens_q=batch.cu_seqlens_q,
            kv_lens_R=batch.kv_lens_K,
            page_table_RP=batch.pages_KP,
            page_size=self.cache.page_size,
            causal_R=batch.causal_K,
            gap_R=batch.gap_K,
            max_q=batch.max_q,
            exact=batch.split is not None,
            rows_each=batch.rows_each,
        )
        layouts = {w: layout if w is None else replace(layout, window=w) for w in dict.fromkeys(self._windows)}
        by_window = {window: self.attention.bind(of_window) for window, of_window in layouts.items()}
        return PagedAttention(self.cache, batch.write_loc_T, [by_window[window] for window in self._windows])

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Final hidden states (A, D) of the asked positions."""
        self.last_batch = batch
        attend = self.bind(batch)
        ids_T, positions_T, weight_T = batch.input_ids_T, batch.positions_T, batch.weight_T
        adapters = None
        if batch.adapter_T is not None:
            assert self.adapters is not None
            adapters = self.adapters.choose(batch.adapter_T)
        if batch.split is None and self._fused_decoder is not None:
            hidden = self._fused_decoder.forward(
                ids_T, positions_T, attend, soft_weight=weight_T, adapters=adapters, live=batch.live_T
            )
        else:
            hidden = self.model(
                ids_T,
                positions_T,
                attend,
                soft_weight=weight_T,
                split=batch.split,
                adapters=adapters,
                denoising=batch.denoising,
            )
        self._hidden_TD = hidden
        if self.model.config.shift_logits:
            hidden = torch.cat((hidden, self.last_RD))
        return hidden if batch.logits_at_A is None else hidden.index_select(0, batch.logits_at_A)

    def forget_batch(self) -> None:
        """Releases the last forward's tensors, which may lie in a graph's memory."""
        self.last_batch = None
        self._hidden_TD = self._hidden_TD.new_zeros((0, self._hidden_TD.shape[1]))

    @property
    def has_kernel_layers(self) -> bool:
        """Whether some layer runs by Triton kernels, where rows are not computed apart."""
        return self._fused_decoder is not None and self._fused_decoder.has_kernel_layers

    def weights_changed(self) -> None:
        """Renews derived weights after the decoder's weights were overwritten in place."""
        if self._fused_decoder is not None:
            self._fused_decoder.refresh()

    @torch.inference_mode()
    def logits(self, hidden_AD: Tensor, *, split: Sequence[int] | None = None) -> Tensor:
        """Raw logits (A, V) of hidden states. `split`: the lengths of runs of rows that are computed apart; `None`:
        all at once. Ranks call it together."""
        return self.model.logits(hidden_AD, split=split)

    @torch.inference_mode()
    def own_logits(self, hidden_AD: Tensor, *, split: Sequence[int] | None = None) -> Tensor:
        """The logits of this rank's part of the vocabulary; `split` as in `logits`."""
        return self.model.own_logits(hidden_AD, split=split)

    @torch.inference_mode()
    def expected_embedding(self, probabilities_PV: Tensor) -> Tensor:
        """The mean embeddings (P, D) under probabilities. Ranks call it together."""
        return self.model.expected_embedding(probabilities_PV)

    def blockwise_logits(
        self, hidden_AD: Tensor, batch: Batch, *, block_size: int, whole: bool
    ) -> Callable[[slice], Tensor]:
        """The logits of a range of `hidden_AD`; in a batch-invariant batch, ranges are whole blocks, each apart.

        Without `whole` they cover this rank's part of the vocabulary.
        """
        head = self.logits if whole else self.own_logits

        def logits_of(part: slice) -> Tensor:
            blocks = (part.stop - part.start) // block_size
            return head(hidden_AD[part], split=None if batch.split is None else [block_size] * blocks)

        return logits_of

    def remember_prompts(self, ends: Sequence[tuple[int, int]]) -> None:
        """Keep the last forward's hidden states at (batch row, packed token), where prefixes end."""
        if ends and self.model.config.shift_logits:
            rows, places = to_device(ends, self._hidden_TD.device).T
            self.last_RD[rows] = self._hidden_TD[places]

    def remember_committed(self, slot_end_RN: Tensor | None, num_blocks_R: Tensor) -> None:
        """Keeps the last forward's hidden state of every batch row that committed blocks, at the last committed
        token."""
        if slot_end_RN is None or not self.model.config.shift_logits:
            return
        last_block_R = (num_blocks_R - 1).clamp(min=0)
        at_R = slot_end_RN.gather(1, last_block_R[:, None])[:, 0]
        last_RD = self.last_RD[: len(at_R)]
        last_RD.copy_(torch.where((num_blocks_R > 0)[:, None], self._hidden_TD[at_R], last_RD))
