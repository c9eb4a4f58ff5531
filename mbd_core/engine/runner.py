"""One forward: rows are packed into a batch, and the model runs on it, with logits where they are asked for.

Shape legend: K rows, T packed tokens, P pages a row, A positions asked for, R batch rows, D hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.decoding.blocks.arrays import arange, array_of, at_most, int32, repeat, tensor_of, where
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.engine.pages import PagedKVCache
from mbd_core.models.decoder import Decoder
from mbd_core.models.fused import fuse
from mbd_core.models.gemma import Denoising
from mbd_core.models.layer_parts import Reduce
from mbd_core.models.lora import AdapterSlots
from mbd_core.models.shard import Shard
from mbd_core.ops.attention.choice import AttentionKernel
from mbd_core.ops.attention.definition import BoundAttention, RowLayout
from mbd_core.ops.layer.confidence import confidence, part_confidence

# What one forward needs, and how rows from prompts, slots and canvases are packed for it.
#
# A row is a run of neighbouring positions of one sequence. It attends to the sequence's keys up to some length, with
# or without causal order inside itself. That is all that the methods have in common, and all that the kernels need.


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a forward.

    lengths_K    tokens of each row; one number where all are alike
    kv_lens_K    keys each row attends to, its own included
    causal_K     whether each of its tokens sees one key less than the token behind it; `None`: no row is causal
    pages_KP     the pages of its sequence, padded with the null page
    stored_K     whether its keys are stored in its pages; otherwise they go to the null page
    weight_T     DMax's embedding weights, `None` where all tokens are hard
    denoising    which of their tokens are being denoised; `None`: none is
    adapter_K    the slot of each row's LoRA adapter, 0 for none; `None` where no row of the forward has one
    rows_each    that many neighbouring rows are one sequence's, all through the group
    live_K       whether anything of the row is read afterwards; `None`: all rows are
    layout       equal in rows that differ in their tokens alone; `None`: they are compared
    logits_at_A  packed tokens of the whole forward whose hidden states give logits; -1 - r stands for the hidden
                 state that the runner remembers for batch row r
    """

    tokens_T: Tensor
    positions_T: Tensor
    lengths_K: list[int] | int
    kv_lens_K: Tensor
    pages_KP: Tensor
    stored_K: Tensor
    logits_at_A: Tensor
    causal_K: Tensor | None = None
    weight_T: Tensor | None = None
    denoising: Denoising | None = None
    adapter_K: Tensor | None = None
    rows_each: int = 1
    live_K: Tensor | None = None
    layout: tuple[object, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One forward. `write_loc_T` points into the null page for tokens that are not stored.

    logits_at_A  packed tokens whose hidden states give logits, `None`: all in their order; T + r stands for the hidden
                 state that the runner remembers for row r (models whose logits predict the next position)
    adapter_T    the slot of each token's LoRA adapter, `None` where no token has one
    causal_K     which rows are causal inside; `None`: none is
    split        rows' lengths where each is to be computed apart (batch-invariant)
    rows_each    that many neighbouring rows, all of the same length, are one sequence's, all through the batch
    live_T       whether anything of the token is read afterwards; `None`: all tokens are
    denoising    which tokens are being denoised; `None`: none is
    layout       what tells that another batch differs in its tokens alone (`_layout`)
    """

    input_ids_T: Tensor
    positions_T: Tensor
    cu_seqlens_q: Tensor
    kv_lens_K: Tensor
    pages_KP: Tensor
    write_loc_T: Tensor
    logits_at_A: Tensor | None
    weight_T: Tensor | None
    max_q: int
    causal_K: Tensor | None = None
    adapter_T: Tensor | None = None
    split: list[int] | None = None
    rows_each: int = 1
    live_T: Tensor | None = None
    denoising: Denoising | None = None
    layout: tuple[object, ...] | None = None

    @property
    def num_logits(self) -> int:
        return len(self.input_ids_T if self.logits_at_A is None else self.logits_at_A)


def to_device(values: Sequence[object], device: torch.device) -> Tensor:
    """Integers of the host as an int64 tensor on `device`; the host does not wait for the copy."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def pack(groups: Sequence[Rows], *, page_size: int, batch_invariant: bool = False, last: Batch | None = None) -> Batch:
    """Put groups of rows behind one another; at least one row in all.

    Where each row is computed apart, each token of a causal row is: its numbers then do not depend on where rows end.
    A batch that differs from the `last` one in its tokens alone has the rest of it, its tensors included.
    """
    groups = [g for g in groups if len(g.kv_lens_K)]
    layout, num_tokens = _layout(groups), sum(len(g.tokens_T) for g in groups)
    logits_at_A = array_of(_concat([g.logits_at_A for g in groups]))
    tokens: dict[str, Any] = {
        "input_ids_T": _concat([g.tokens_T for g in groups]),
        "logits_at_A": tensor_of(where(logits_at_A < 0, num_tokens - 1 - logits_at_A, logits_at_A)),
        "weight_T": _weights(groups),
        "denoising": _denoising(groups),
    }
    if last is not None and layout is not None and layout == last.layout:
        return replace(last, **tokens)
    if batch_invariant:
        groups = [_token_by_token(g) for g in groups]
    width = max(g.pages_KP.shape[1] for g in groups)
    same_width = all(g.pages_KP.shape[1] == width for g in groups)
    table_KP = [g.pages_KP if same_width else F.pad(g.pages_KP, (0, width - g.pages_KP.shape[1])) for g in groups]
    pages_KP, positions_T = array_of(_concat(table_KP)), array_of(_concat([g.positions_T for g in groups]))
    stored_K = array_of(_concat([g.stored_K for g in groups]))
    row_lengths = {g.lengths_K if isinstance(g.lengths_K, int) else -1 for g in groups}
    num_rows = len(pages_KP)
    if len(row_lengths) == 1 and -1 not in row_lengths:
        max_q = row_lengths.pop()
        bounds = arange(positions_T, 0, num_rows * max_q + 1, max_q)
        row_T = repeat(arange(positions_T, num_rows), max_q)
    else:
        lengths = _lengths(groups)
        max_q = max(lengths)
        lengths_K = to_device(lengths, groups[0].tokens_T.device)
        bounds = array_of(F.pad(lengths_K.cumsum(0), (1, 0)))
        rows = torch.arange(num_rows, device=lengths_K.device)
        row_T = array_of(rows.repeat_interleave(lengths_K, output_size=num_tokens))
    page_T = pages_KP.reshape(-1)[row_T * width + at_most(positions_T // page_size, width - 1)]
    offset_T = positions_T % page_size
    live_K = None if len(groups) > 1 else groups[0].live_K
    return Batch(
        **tokens,
        positions_T=tensor_of(positions_T),
        cu_seqlens_q=tensor_of(int32(bounds)),
        kv_lens_K=_concat([g.kv_lens_K for g in groups]),
        pages_KP=tensor_of(pages_KP),
        write_loc_T=tensor_of(where(stored_K[row_T], page_T * page_size, 0) + offset_T),
        max_q=max_q,
        causal_K=_causal(groups),
        adapter_T=_adapters(groups, tensor_of(row_T)),
        split=_lengths(groups) if batch_invariant else None,
        rows_each=groups[0].rows_each if len(groups) == 1 else 1,
        live_T=None if live_K is None else live_K[tensor_of(row_T)],
        layout=layout,
    )


def _layout(groups: Sequence[Rows]) -> tuple[object, ...] | None:
    """All that a batch has of its rows but their tokens, to be compared; `None` on a GPU, whose host does not wait."""
    if not groups[0].tokens_T.is_cpu:
        return None
    parts: list[object] = []
    for g in groups:
        if g.layout is not None:
            parts.append(g.layout)
            continue
        parts += g.lengths_K if isinstance(g.lengths_K, list) else [g.lengths_K]
        tensors = (g.positions_T, g.kv_lens_K, g.pages_KP, g.stored_K, g.causal_K, g.adapter_K, g.live_K)
        parts += [g.rows_each, *(None if x is None else x.numpy().tobytes() for x in tensors)]
    return tuple(parts)


def _concat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _lengths(groups: Sequence[Rows]) -> list[int]:
    lengths: list[int] = []
    for g in groups:
        lengths += [g.lengths_K] * len(g.kv_lens_K) if isinstance(g.lengths_K, int) else g.lengths_K
    return lengths


def _causal(groups: Sequence[Rows]) -> Tensor | None:
    if all(g.causal_K is None for g in groups):
        return None
    return torch.cat([torch.zeros_like(g.stored_K) if g.causal_K is None else g.causal_K for g in groups])


def _token_by_token(rows: Rows) -> Rows:
    """The same forward with a row for each token of a causal row."""
    if rows.causal_K is None:
        return rows
    device = rows.tokens_T.device
    lengths, parts, behind = _lengths([rows]), [], []
    for length, causal in zip(lengths, rows.causal_K.tolist(), strict=True):
        parts.append([1] * length if causal else [length])
        behind += [length - 1 - i if causal else 0 for i in range(len(parts[-1]))]
    row_K = torch.arange(len(parts), device=device).repeat_interleave(to_device([len(p) for p in parts], device))
    return replace(
        rows,
        lengths_K=[n for part in parts for n in part],
        kv_lens_K=rows.kv_lens_K[row_K] - to_device(behind, device),
        pages_KP=rows.pages_KP[row_K],
        stored_K=rows.stored_K[row_K],
        causal_K=None,
        adapter_K=None if rows.adapter_K is None else rows.adapter_K[row_K],
        rows_each=1,
        live_K=None if rows.live_K is None else rows.live_K[row_K],
    )


def _adapters(groups: Sequence[Rows], row_T: Tensor) -> Tensor | None:
    slots = [g.adapter_K for g in groups if g.adapter_K is not None]
    assert len(slots) in (0, len(groups)), "adapters are laid out for all rows of a forward, or for none"
    return _concat(slots)[row_T] if slots else None


def _weights(groups: Sequence[Rows]) -> Tensor | None:
    if all(g.weight_T is None for g in groups):
        return None
    return _concat(
        [torch.ones_like(g.tokens_T, dtype=torch.float32) if g.weight_T is None else g.weight_T for g in groups]
    )


def _denoising(groups: Sequence[Rows]) -> Denoising | None:
    """Which tokens of the forward are being denoised; `None`: none is."""
    given = next((g.denoising for g in groups if g.denoising is not None), None)
    if given is None:
        return None
    at, expected = [], []
    for g in groups:
        part = g.denoising
        at.append(torch.zeros_like(g.tokens_T, dtype=torch.bool) if part is None else part.at)
        zeros = given.expected.new_zeros((len(g.tokens_T), given.expected.shape[1])) if part is None else part.expected
        expected.append(zeros)
    return Denoising(_concat(at), _concat(expected))


# The model on a batch: embeddings, layers with paged attention, logits.


@dataclass(frozen=True)
class PagedAttention:
    """The `Attend` of a paged forward: store this batch's keys, then attend through the page table, layer by layer as
    `attends` say."""

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
        """Attend, this batch's keys being stored."""
        return self.attends[layer](q, *self.cache.layers[layer])


class ModelRunner:
    """Runs the decoder over batches: its fused form, or, for batch-invariant rows, the decoder itself, row by row.
    Gemma's layers have no fused form.
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
        c = model.config
        self._windows = [c.window_of(layer) for layer in range(c.num_layers)]
        self._fused_decoder = fuse(model, num_positions=num_positions) if c.gemma is None else None
        weights = model.model.norm.weight
        self._attend: PagedAttention | None = None  # the last forward's, which a batch of the same layout takes again
        self.last_batch: Batch | None = None  # after a replay: the batch that the replay has filled
        self._hidden_TD = weights.new_zeros((0, model.config.hidden_size))
        self.last_RD = weights.new_zeros((num_rows, model.config.hidden_size))

    def bind(self, batch: Batch) -> PagedAttention:
        """The batch's attention, laid out once for all layers that see the same keys."""
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
        layouts = {w: layout if w is None else replace(layout, window=w) for w in dict.fromkeys(self._windows)}
        by_window = {window: self.attention.bind(of_window) for window, of_window in layouts.items()}
        return PagedAttention(self.cache, batch.write_loc_T, [by_window[window] for window in self._windows])

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Final hidden states (A, D) of the positions that are asked for."""
        self.last_batch = batch
        attend = self._attend
        if attend is None or attend.write_loc_T is not batch.write_loc_T:
            attend = self.bind(batch)
        self._attend = None if batch.layout is None else attend  # which on a GPU would keep a graph's memory
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
        """Let go of the last forward's tensors, which may lie in a graph's memory."""
        self.last_batch = self._attend = None
        self._hidden_TD = self._hidden_TD.new_zeros((0, self._hidden_TD.shape[1]))

    @property
    def has_kernel_layers(self) -> bool:
        """Whether some layer runs by Triton kernels, where rows are not computed apart."""
        return self._fused_decoder is not None and self._fused_decoder.has_kernel_layers

    def weights_changed(self) -> None:
        """The decoder's weights were overwritten in place."""
        if self._fused_decoder is not None:
            self._fused_decoder.refresh()

    @torch.inference_mode()
    def logits(self, hidden_AD: Tensor, *, split: Sequence[int] | None = None) -> Tensor:
        """Logits (A, V), raw: a position's own row; `split` computes runs of rows apart. Ranks call it together."""
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

        Unless `whole`, they are those of this rank's part of the vocabulary.
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
        """Keep the last forward's hidden state of every batch row that committed blocks, at the last token of the last
        of them; on a GPU in static shapes."""
        if slot_end_RN is None or not self.model.config.shift_logits:
            return
        if num_blocks_R.is_cpu:
            for row, count in enumerate(num_blocks_R.tolist()):
                if count:
                    self.last_RD[row] = self._hidden_TD[int(slot_end_RN[row, count - 1])]
            return
        last_block_R = (num_blocks_R - 1).clamp(min=0)
        at_R = slot_end_RN.gather(1, last_block_R[:, None])[:, 0]
        last_RD = self.last_RD[: len(at_R)]
        last_RD.copy_(torch.where((num_blocks_R > 0)[:, None], self._hidden_TD[at_R], last_RD))


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
        place_P, logit_P, lse_P = self._likeliest_of_part(logits_PV)
        # Token ids are below 2^24, so exact in float32; a sum with zeros changes nothing.
        shared_G3P = logit_P.new_zeros((self.shard.size, 3, len(logit_P)))
        torch.stack(((place_P + self.part.start).float(), logit_P, lse_P), out=shared_G3P[self.shard.rank])
        token_GP, logit_GP, lse_GP = self.reduce(shared_G3P).unbind(1)
        best_P = logit_GP.amax(0)
        # The lowest id among equals; where all are NaN, none is equal, and any id in range will do.
        token_P = torch.where(logit_GP == best_P, token_GP, torch.inf).amin(0).clamp(max=self.size - 1)
        return token_P.long(), (best_P - lse_GP.logsumexp(0)).exp()

    def _likeliest_of_part(self, logits_PV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
