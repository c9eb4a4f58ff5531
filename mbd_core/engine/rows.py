"""How prompt chunks and slots become rows of a forward.

Shape legend: R rows (sequences), N slots, B block size, K rows of a forward, P pages a row, A positions asked for.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.decoding.block_buffer import BlockBuffer
from mbd_core.engine.batch import Rows, to_device
from mbd_core.engine.scheduler import PrefillChunk


@dataclass(frozen=True)
class Slots:
    """The slots of a forward.

    at_A         places of the flattened buffer that get logits, in the order of `rows.logits_at_A`; `None`: all. One
                 behind the last stands for nothing
    slot_end_RN  the packed token at which each slot ends
    """

    rows: Rows
    at_A: Tensor | None
    slot_end_RN: Tensor


def prompt_rows(chunks: Seq[PrefillChunk], tables_RP: Tensor, *, block_size: int) -> Rows:
    """Blocks of prefixes to be stored, a row each; a prompt under full attention is one row."""
    device = tables_RP.device
    tokens: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    rows: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.start : chunk.stop]
        step = block_size if chunk.start >= chunk.sequence.origin else chunk.stop - chunk.start
        row_starts = range(chunk.start, chunk.stop, step)
        starts += row_starts
        lengths += [step] * len(row_starts)
        rows += [chunk.sequence.row] * len(row_starts)
    starts_K, lengths_K = to_device([starts, lengths], device)
    offset_K = starts_K - (lengths_K.cumsum(0) - lengths_K)
    return Rows(
        tokens_T=to_device(tokens, device),
        positions_T=torch.arange(len(tokens), device=device)
        + offset_K.repeat_interleave(lengths_K, output_size=len(tokens)),
        lengths_K=block_size if all(n == block_size for n in lengths) else lengths,
        kv_lens_K=starts_K + lengths_K,
        pages_KP=tables_RP[to_device(rows, device)],
        stored_K=torch.ones(len(rows), dtype=torch.bool, device=device),
        logits_at_A=torch.zeros(0, dtype=torch.int64, device=device),
    )


def completing(chunks: Seq[PrefillChunk]) -> list[tuple[int, int]]:
    """Of the chunks that complete their sequence's prefix: its row, and the packed token at which it ends."""
    out, stop = [], 0
    for chunk in chunks:
        stop += chunk.stop - chunk.start
        if chunk.stop == chunk.sequence.prefix_length:
            out.append((chunk.sequence.row, stop - 1))
    return out


def resident_slots(
    buffer: BlockBuffer,
    tables_RP: Tensor,
    chunks: Seq[PrefillChunk],
    *,
    shift: bool,
    softens: bool,
    whole: bool,
) -> Slots:
    """Resident slots behind the chunks' rows (Alg. 4). Logits are asked where a position can change, or in `whole`
    slots, so that a row's product has the same shape whatever is open in it."""
    size, resident_RN = buffer.block_size, buffer.resident_RN
    row, slot = resident_RN.nonzero(as_tuple=True)
    before = sum(c.stop - c.start for c in chunks)
    positions_KB = buffer.positions_RNB[row, slot]
    num_slots = resident_RN.shape[1]
    asked_KB = torch.ones_like(positions_KB, dtype=torch.bool) if whole else buffer.asked_RNB[row, slot]
    logits_at = asked_KB.flatten().nonzero()[:, 0]
    slot_A = (row * num_slots + slot)[logits_at // size]
    slot_end_RN = torch.zeros_like(resident_RN, dtype=torch.int64)
    slot_end_RN[row, slot] = torch.arange(len(row), device=row.device) * size + size - 1 + before
    if shift:
        # in front of slot 0 stands the last committed position: in this forward if its chunk is, else remembered
        last = [-1 - r for r in range(len(resident_RN))]
        for at_row, at in completing(chunks):
            last[at_row] = at
        of = logits_at // size
        opens = (slot[of] == 0) & (logits_at % size == 0)
        hidden_at = torch.where(opens, to_device(last, row.device)[row[of]], logits_at + before - 1)
    else:
        hidden_at = logits_at + before
    rows = Rows(
        tokens_T=buffer.tokens_RNB[row, slot].flatten(),
        positions_T=positions_KB.flatten(),
        lengths_K=size,
        kv_lens_K=positions_KB[:, -1] + 1,
        pages_KP=tables_RP[row],
        stored_K=torch.ones_like(row, dtype=torch.bool),
        logits_at_A=hidden_at,
        weight_T=buffer.weight_RNB[row, slot].flatten() if softens else None,
    )
    return Slots(rows, slot_A * size + logits_at % size, slot_end_RN)


def all_slots(
    buffer: BlockBuffer, tables_RP: Tensor, *, shift: bool, softens: bool, num_asked: int | None = None
) -> Slots:
    """Every slot of every row, used or not (Alg. 5): shapes and steps that depend on nothing but the buffer's size.

    An unused slot attends to one key and stores into the null page; what comes of it is not read. Logits are asked at
    the `num_asked` first positions that can change, which must be as many as there are, or (`None`) everywhere.
    """
    size, resident_RN = buffer.block_size, buffer.resident_RN
    num_rows, num_slots = resident_RN.shape
    device = resident_RN.device
    positions_RNB = buffer.positions_RNB
    at = torch.arange(num_rows * num_slots * size, device=device).view(num_rows, num_slots, size)
    slot_end_RN = at[..., -1]
    if shift:
        remembered = -1 - torch.arange(num_rows, device=device)[:, None]
        at = torch.cat((remembered, at.flatten(1)[:, :-1]), dim=1)
    hidden_at, at_A = at.flatten(), None
    if num_asked is not None:
        total = hidden_at.numel()
        at_A = torch.nonzero_static(buffer.asked_RNB.flatten(), size=num_asked, fill_value=total)[:, 0]
        hidden_at = hidden_at[at_A.clamp(max=total - 1)]
    rows = Rows(
        tokens_T=buffer.tokens_RNB.flatten(),
        positions_T=positions_RNB.flatten(),
        lengths_K=size,
        kv_lens_K=torch.where(resident_RN, positions_RNB[..., -1] + 1, 1).flatten(),
        pages_KP=tables_RP.repeat_interleave(num_slots, dim=0, output_size=num_rows * num_slots),
        stored_K=resident_RN.flatten(),
        logits_at_A=hidden_at,
        weight_T=buffer.weight_RNB.flatten() if softens else None,
    )
    return Slots(rows, at_A, slot_end_RN)
