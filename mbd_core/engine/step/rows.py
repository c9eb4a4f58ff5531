"""Which rows a forward has: prompt chunks, slots of the Block Buffer, rows that decoders plan on the host.

Shape legend: R rows (sequences), N slots, B block size, K rows of a forward, P pages a row, A positions asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.engine.schedule.scheduler import PrefillChunk
from mbd_core.engine.step.batch import BatchRows, to_device
from mbd_core.engine.step.planned_rows import PlannedRuns


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """How slots are laid out for a forward.

    shift    logits predict the next position: a position's logits come from the hidden state before it
    softens  filled positions are embedded as DMax's mixtures
    whole    every position of a slot has logits, so that a row's product has the same shape whatever is open in it
    """

    shift: bool = False
    softens: bool = False
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The draft model's rows in a step: prompt chunks, drafts, or both.

    asked     positions with logits, in parts that are computed together
    by_model  of each planned row of the step, in order: its positions with logits, and whether it is in `groups`
    """

    groups: list[BatchRows]
    asked: list[int]
    by_model: list[tuple[int, bool]]


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The rows of one forward, group after group: prompt chunks, slots, planned rows.

    num_asked      positions of slots that get logits: the first of the forward's hidden states
    at_A           their places in the flattened buffer; `None`: all places in order. A place past the last place is
                   padding
    slot_end_RN    the packed token at which each slot ends
    prompt_ends    (batch row, packed token) at which a sequence's prefix ends in this forward
    planned_asked  sizes of the groups of planned positions whose logits are computed together; these positions stand
                   after the slots' positions. `None` without planned rows
    read_planned   `PlannedRuns.read` if the decoders of planned rows read the logits themselves
    drafts         the rows that go through the draft model, if there are any
    """

    groups: list[BatchRows]
    num_asked: int = 0
    at_A: Tensor | None = None
    slot_end_RN: Tensor | None = None
    prompt_ends: list[tuple[int, int]] = field(default_factory=list)
    planned_asked: list[int] | None = None
    read_planned: Callable[..., list[Any]] | None = None
    drafts: DraftRows | None = None


def packed_rows(
    buffer: BlockBuffer | None,
    tables_RP: Tensor,
    chunks: Sequence[PrefillChunk],
    planned: PlannedRuns,
    layout: SlotLayout,
    *,
    block_size: int,
    adapters_R: Tensor | None = None,
) -> StepRows:
    """Prompt chunks, resident slots (Alg. 4) of `buffer`, if there is one, and planned rows.

    `adapters_R` has the adapter slot of each batch row; `None` if no sequence has a LoRA adapter.
    """
    prompts = [prompt_rows(chunks, tables_RP, block_size=block_size, adapters_R=adapters_R)] if chunks else []
    num_tokens, ends = sum(c.stop - c.start for c in chunks), _prompt_ends(chunks)
    slots = StepRows(groups=[])
    if buffer is not None:
        slots = resident_slots(
            buffer, tables_RP, layout, num_before=num_tokens, prompt_ends=ends, adapters_R=adapters_R
        )
    num_tokens += sum(len(g.tokens_T) for g in slots.groups)
    planned_rows = planned.rows(num_before=num_tokens, adapts=adapters_R is not None)
    return replace(
        slots,
        groups=[*prompts, *slots.groups, *([] if planned_rows is None else [planned_rows])],
        prompt_ends=ends,
        planned_asked=None if planned_rows is None else planned.num_alike(),
        read_planned=planned.read if planned.reads else None,
        drafts=_draft_rows(tables_RP, chunks, planned, block_size=block_size),
    )


def _draft_rows(
    tables_RP: Tensor, chunks: Sequence[PrefillChunk], planned: PlannedRuns, *, block_size: int
) -> DraftRows | None:
    """Prompt chunks of the requests for which the draft model drafts, and its drafts."""
    own = [chunk for chunk in chunks if chunk.sequence.is_drafted]
    prompts = [prompt_rows(own, tables_RP, block_size=block_size)] if own else []
    drafts = planned.draft_rows(num_before=sum(c.stop - c.start for c in own))
    groups = [*prompts, *([] if drafts is None else [drafts])]
    if not groups:
        return None
    return DraftRows(groups=groups, asked=planned.num_alike(by_draft_model=True), by_model=planned.num_by_model)


def prompt_rows(
    chunks: Sequence[PrefillChunk], tables_RP: Tensor, *, block_size: int, adapters_R: Tensor | None = None
) -> BatchRows:
    """Blocks of prefixes to be stored, one row per block. A prompt under full attention is one row, and so is a causal
    chunk."""
    device = tables_RP.device
    tokens: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    rows: list[int] = []
    causal: list[bool] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.start : chunk.stop]
        size = chunk.sequence.store
        step = size if size is not None and chunk.start >= chunk.sequence.origin else chunk.stop - chunk.start
        row_starts = range(chunk.start, chunk.stop, step)
        starts += row_starts
        lengths += [step] * len(row_starts)
        rows += [chunk.sequence.row] * len(row_starts)
        causal += [size is None] * len(row_starts)
    starts_K, lengths_K = to_device([starts, lengths], device)
    rows_K = to_device(rows, device)
    offset_K = starts_K - (lengths_K.cumsum(0) - lengths_K)
    return BatchRows(
        tokens_T=to_device(tokens, device),
        positions_T=torch.arange(len(tokens), device=device)
        + offset_K.repeat_interleave(lengths_K, output_size=len(tokens)),
        lengths_K=block_size if all(n == block_size for n in lengths) else lengths,
        kv_lens_K=starts_K + lengths_K,
        pages_KP=tables_RP[rows_K],
        stored_K=torch.ones(len(rows), dtype=torch.bool, device=device),
        logits_at_A=torch.zeros(0, dtype=torch.int64, device=device),
        causal_K=torch.tensor(causal, device=device) if any(causal) else None,
        adapter_K=None if adapters_R is None else adapters_R[rows_K],
    )


def _prompt_ends(chunks: Sequence[PrefillChunk]) -> list[tuple[int, int]]:
    """The chunks that complete the prefix of a sequence in the buffer, each as its batch row and the packed token at
    which the prefix ends."""
    ends, stop = [], 0
    for chunk in chunks:
        stop += chunk.stop - chunk.start
        if chunk.stop == chunk.sequence.prefix_length and not chunk.sequence.is_planned:
            ends.append((chunk.sequence.row, stop - 1))
    return ends


def resident_slots(
    buffer: BlockBuffer,
    tables_RP: Tensor,
    layout: SlotLayout,
    *,
    num_before: int,
    prompt_ends: list[tuple[int, int]],
    adapters_R: Tensor | None = None,
) -> StepRows:
    """Resident slots (Alg. 4) after `num_before` packed tokens. Positions that can change get logits, or with `whole`
    all positions."""
    size, resident_RN = buffer.block_size, buffer.resident_RN
    slot_K = resident_RN.flatten().nonzero()[:, 0]  # its place in the buffer
    row_K = slot_K // buffer.num_slots

    def resident(x_RNB: Tensor) -> Tensor:
        return x_RNB.flatten(0, 1).index_select(0, slot_K)

    positions_KB, asked_KB = resident(buffer.positions_RNB), resident(buffer.asked_RNB)
    asked_at_A = (asked_KB | layout.whole).flatten().nonzero()[:, 0]
    slot_A = slot_K[asked_at_A // size]
    slot_end_RN = torch.zeros_like(resident_RN, dtype=torch.int64)
    first_end = num_before + size - 1
    ends_K = torch.arange(first_end, first_end + len(row_K) * size, size, device=row_K.device)
    slot_end_RN.view(-1).index_copy_(0, slot_K, ends_K)
    hidden_at_A = asked_at_A + num_before
    if layout.shift:
        # Slot 0 is predicted from the last committed position: from this forward if it stores that position's chunk,
        # else from the remembered hidden state.
        front_at = [-1 - r for r in range(len(resident_RN))]
        for end_row, end in prompt_ends:
            front_at[end_row] = end
        slot_of_A, is_first_A = asked_at_A // size, asked_at_A % size == 0
        opens_A = is_first_A & (slot_A % buffer.num_slots == 0)
        front_at_A = to_device(front_at, row_K.device)[row_K[slot_of_A]]
        hidden_at_A = torch.where(opens_A, front_at_A, hidden_at_A - 1)
        stores_A = is_first_A & buffer.carried_RN.flatten()[slot_A]
        hidden_at_A = torch.where(stores_A, ends_K[slot_of_A], hidden_at_A)
    rows = BatchRows(
        tokens_T=resident(buffer.tokens_RNB).flatten(),
        positions_T=positions_KB.flatten(),
        lengths_K=size,
        kv_lens_K=positions_KB[:, -1] + 1,
        pages_KP=tables_RP.index_select(0, row_K),
        stored_K=torch.ones_like(row_K, dtype=torch.bool),
        logits_at_A=hidden_at_A,
        weight_T=resident(buffer.weight_RNB).flatten() if layout.softens else None,
        adapter_K=None if adapters_R is None else adapters_R[row_K],
    )
    at_A = slot_A * size + asked_at_A % size
    return StepRows(groups=[rows], num_asked=len(at_A), at_A=at_A, slot_end_RN=slot_end_RN)


def static_rows(
    buffer: BlockBuffer,
    tables_RP: Tensor,
    layout: SlotLayout,
    *,
    num_slots: int,
    num_asked: int | None = None,
    adapters_R: Tensor | None = None,
) -> StepRows:
    """The first `num_slots` slots of every batch row, resident or not (Alg. 5): shapes that depend on no value.

    The slots after them must be empty. A slot that is not resident attends to one key and stores into the null page;
    its result is not read. The positions that can change get logits, which must be at most `num_asked`; with `None`
    all positions do.
    """
    size, resident_RN = buffer.block_size, buffer.resident_RN[:, :num_slots]
    num_rows, device = len(resident_RN), resident_RN.device
    positions_RNB = buffer.positions_RNB[:, :num_slots]
    hidden_at_RNB = torch.arange(num_rows * num_slots * size, device=device).view(num_rows, num_slots, size)
    slot_end_RN = hidden_at_RNB[..., -1]
    if layout.shift:
        front_at_R1 = -1 - torch.arange(num_rows, device=device)[:, None]
        hidden_at_RNB = torch.cat((front_at_R1, hidden_at_RNB.flatten(1)[:, :-1]), dim=1).view_as(hidden_at_RNB)
        hidden_at_RNB[..., 0] = torch.where(buffer.carried_RN[:, :num_slots], slot_end_RN, hidden_at_RNB[..., 0])
    hidden_at_A, at_A = hidden_at_RNB.flatten(), None
    if num_asked is not None:
        total = hidden_at_A.numel()
        at_A = torch.nonzero_static(buffer.asked_RNB[:, :num_slots].flatten(), size=num_asked, fill_value=total)[:, 0]
        hidden_at_A = hidden_at_A[at_A.clamp(max=total - 1)]
    elif num_slots < buffer.num_slots:
        at_A = torch.arange(hidden_at_A.numel(), device=device)
    if at_A is not None:  # places among these slots become places in the buffer
        at_A = at_A + at_A // (num_slots * size) * ((buffer.num_slots - num_slots) * size)
    rows = BatchRows(
        tokens_T=buffer.tokens_RNB[:, :num_slots].flatten(),
        positions_T=positions_RNB.flatten(),
        lengths_K=size,
        kv_lens_K=torch.where(resident_RN, positions_RNB[..., -1] + 1, 1).flatten(),
        pages_KP=tables_RP.repeat_interleave(num_slots, dim=0, output_size=num_rows * num_slots),
        stored_K=resident_RN.flatten(),
        logits_at_A=hidden_at_A,
        weight_T=buffer.weight_RNB[:, :num_slots].flatten() if layout.softens else None,
        adapter_K=None
        if adapters_R is None
        else adapters_R.repeat_interleave(num_slots, output_size=num_rows * num_slots),
        rows_each=num_slots,
        live_K=resident_RN.flatten(),
    )
    return StepRows(groups=[rows], num_asked=len(hidden_at_A), at_A=at_A, slot_end_RN=slot_end_RN)
