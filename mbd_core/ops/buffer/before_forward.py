"""The Block Buffer's work before a forward as Triton kernels: slots are activated, and rows laid out for the model.

They do what `BlockBuffer.activate`, `rows.static_rows` and `batch.pack` do for a static step, to the bit. A program of
the first kernel takes one sequence, slot by slot. The second, one program, lists the positions that need logits.

Shape legend: R rows (sequences), N slots, S slots of the step, B block size, K = R * S rows of the forward, T = K * B
tokens, P pages, A positions with logits, X numbers of a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mbd_core.ops.launch import Kernel, launch, power_of_two

# What the Block Buffer's kernels read and write, and where a step's report has its parts.
#
# Shape legend: R rows (sequences), N slots, B block size, X numbers of a report, I and F columns of settings.


@dataclass(frozen=True, kw_only=True)
class BufferMemory:
    """The tensors of a `BlockBuffer`, all contiguous, and the columns of its rows' settings by name."""

    tokens_RNB: Tensor
    masked_RNB: Tensor
    confidence_RNB: Tensor
    weight_RNB: Tensor
    state_RN: Tensor
    num_steps_RN: Tensor
    stability_RN: Tensor
    positions_RNB: Tensor
    editable_RNB: Tensor
    num_editable_RN: Tensor
    whole_RI: Tensor
    real_RF: Tensor
    max_blocks: Tensor
    eos: Tensor
    mask_token_id: int
    columns: Mapping[str, int]

    @property
    def device(self) -> torch.device:
        return self.tokens_RNB.device

    def places(self, *names: str) -> dict[str, int]:
        """Constants for a kernel: the columns of these settings, the names in capitals, and how many there are."""
        return {name.upper(): self.columns[name] for name in names} | {
            "WHOLE": self.whole_RI.shape[1],
            "REAL": self.real_RF.shape[1],
        }

    def new_report(self) -> Tensor:
        """An empty report (X,), as `engine.report.pack_report` lays one out."""
        rows, slots, size = self.tokens_RNB.shape
        return torch.empty(rows * (4 + slots * (4 + 3 * size)), dtype=torch.float64, device=self.device)


# The Block Buffer's work before a forward as Triton kernels: slots are activated, and rows laid out for the model.

# mypy: disable-error-code="import-not-found, no-untyped-def, attr-defined"


_LISTED, _LIST_WARPS = 1024, 8  # positions that the second kernel looks at at once, and its warps
_PAGES = 128  # page numbers copied at once
tl: Any = None  # triton.language, set when a kernel is compiled


@dataclass(frozen=True, kw_only=True)
class OpenStep:
    """What a forward takes, as in `engine.runner.Batch`, and the report that `buffer_close.close_step` completes.

    logits_at_A  hidden states that give logits, `None`: all tokens' in their order
    at_A         places of the flattened buffer that they belong to; one past the last place is padding
    asked_RNB    int32, which of the A each position of the buffer is, -1 for none; `None`: all, in their order
    """

    report_X: Tensor
    tokens_T: Tensor
    positions_T: Tensor
    cu_seqlens_q: Tensor
    kv_lens_K: Tensor
    pages_KP: Tensor
    write_loc_T: Tensor
    live_T: Tensor
    logits_at_A: Tensor | None
    at_A: Tensor | None
    asked_RNB: Tensor | None


def _progress(masked_ptr, editable_ptr, num_editable_ptr, here, at, inside, SIZE: tl.constexpr):
    """A slot's filled share of its editable positions, float64, which of its positions are editable, and filled."""
    masked = tl.load(masked_ptr + here * SIZE + at, mask=inside, other=0) != 0
    editable = tl.load(editable_ptr + here * SIZE + at, mask=inside, other=0) != 0
    num_open = tl.sum((masked & editable).to(tl.int32), 0)
    progress = 1.0 - num_open.to(tl.float64) / tl.maximum(tl.load(num_editable_ptr + here), 1.0)
    return progress, editable & (masked == 0)


def _lay_out(
    tokens_ptr,
    positions_ptr,
    table,
    out_tokens_ptr,
    out_positions_ptr,
    bounds_ptr,
    kv_lens_ptr,
    pages_ptr,
    places_ptr,
    live_ptr,
    here,
    k,
    live,
    at,
    inside,
    P,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Slot `here` as row `k` of the forward; one that holds no block sees one key and stores into the null page."""
    position = tl.load(positions_ptr + here * SIZE + at, mask=inside, other=0)
    token = tl.load(tokens_ptr + here * SIZE + at, mask=inside, other=0)
    page = tl.load(table + tl.minimum(position // PAGE, P - 1), mask=inside, other=0)
    tl.store(out_tokens_ptr + k * SIZE + at, token, mask=inside)
    tl.store(out_positions_ptr + k * SIZE + at, position, mask=inside)
    tl.store(places_ptr + k * SIZE + at, tl.where(live, page * PAGE, 0) + position % PAGE, mask=inside)
    tl.store(live_ptr + k * SIZE + at, (at >= 0) & live, mask=inside)
    tl.store(bounds_ptr + k, k * SIZE)
    tl.store(bounds_ptr + k + 1, (k + 1) * SIZE)
    seen = tl.load(positions_ptr + here * SIZE + SIZE - 1).to(tl.int32) + 1
    tl.store(kv_lens_ptr + k, tl.where(live, seen, 1))
    for first in range(0, P, PAGES):
        number = first + tl.arange(0, PAGES)
        its = tl.load(table + number, mask=number < P, other=0)
        tl.store(pages_ptr + k.to(tl.int64) * P + number, its.to(tl.int32), mask=number < P)


def _open_kernel(
    tokens_ptr,
    masked_ptr,
    state_ptr,
    stability_ptr,
    positions_ptr,
    editable_ptr,
    num_editable_ptr,
    whole_ptr,
    real_ptr,
    max_blocks_ptr,
    eos_ptr,
    tables_ptr,
    report_ptr,
    out_tokens_ptr,
    out_positions_ptr,
    bounds_ptr,
    kv_lens_ptr,
    pages_ptr,
    places_ptr,
    live_ptr,
    R,
    table_row,
    P,
    num_eos,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WHOLE: tl.constexpr,
    REAL: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    ORIGIN: tl.constexpr,
    END: tl.constexpr,
    LIMIT: tl.constexpr,
    KEPT: tl.constexpr,
    EOS_STOPS: tl.constexpr,
    TAU_ADD: tl.constexpr,
    TAU_STABLE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
):
    """One sequence: at most one slot becomes ACTIVE; then its slots' rows, and the report's view of them."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    whole, real = whole_ptr + row * WHOLE, real_ptr + row * REAL
    resident = 0
    last = -1
    last_progress = tl.full((), 0.0, tl.float64)
    last_stability = tl.full((), 0.0, tl.float64)
    ends = 0
    for slot in range(N):
        here = row * N + slot
        state = tl.load(state_ptr + here).to(tl.int32)
        resident += (state != 0).to(tl.int32)
        progress, filled = _progress(masked_ptr, editable_ptr, num_editable_ptr, here, at, inside, SIZE)
        last = tl.where(state == 1, slot, last)
        last_progress = tl.where(state == 1, progress, last_progress)
        last_stability = tl.where(state == 1, tl.load(stability_ptr + here), last_stability)
        token = tl.load(tokens_ptr + here * SIZE + at, mask=inside, other=0)
        is_eos = at < 0
        for number in range(num_eos):
            is_eos = is_eos | (token == tl.load(eos_ptr + number))
        ends += tl.where(state != 0, tl.sum((is_eos & filled).to(tl.int32), 0), 0)
    ready = (last_progress > tl.load(real + TAU_ADD)) & (last_stability > tl.load(real + TAU_STABLE))
    limit = tl.minimum(tl.load(whole + LIMIT), tl.maximum(tl.load(whole + KEPT), tl.load(max_blocks_ptr)))
    start = tl.load(whole + ORIGIN) + (tl.load(whole + FIRST_BLOCK) + resident) * SIZE
    room = (resident < limit) & (start < tl.load(whole + END)) & (resident < N)
    grows = ((last < 0) | ready) & room & ((ends == 0) | (tl.load(whole + EOS_STOPS) == 0))
    tl.store(state_ptr + row * N + resident, tl.full((), 1, tl.int8), mask=grows)
    any_active = (last >= 0) | grows
    tl.store(report_ptr + 3 * R + row, tl.where(any_active, 0.0, 1.0).to(tl.float64))
    table = tables_ptr + row.to(tl.int64) * table_row
    for slot in range(N):
        here = row * N + slot
        state = tl.load(state_ptr + here).to(tl.int32)
        state = tl.where(grows & (slot == resident), 1, state)
        progress, filled = _progress(masked_ptr, editable_ptr, num_editable_ptr, here, at, inside, SIZE)
        tl.store(report_ptr + 4 * R + here, state.to(tl.float64))
        tl.store(report_ptr + 4 * R + R * N + here, 1.0 - progress)
        if slot < SLOTS:
            _lay_out(
                tokens_ptr,
                positions_ptr,
                table,
                out_tokens_ptr,
                out_positions_ptr,
                bounds_ptr,
                kv_lens_ptr,
                pages_ptr,
                places_ptr,
                live_ptr,
                here,
                row * SLOTS + slot,
                state != 0,
                at,
                inside,
                P,
                SIZE,
                PAGE,
                PAGES,
            )


def _list_kernel(
    masked_ptr,
    editable_ptr,
    state_ptr,
    whole_ptr,
    at_ptr,
    logits_at_ptr,
    asked_ptr,
    R,
    A,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    CARRIES: tl.constexpr,
    EDITS: tl.constexpr,
    SOFTENS: tl.constexpr,
    ALL: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first A positions that can change, or with ALL those of the step's slots, in their order."""
    step = tl.arange(0, BLOCK)
    total = R * N * SIZE
    tokens = R * SLOTS * SIZE
    listed = 0
    for first in range(0, total, BLOCK):
        place = first + step
        inside = place < total
        slot, row = place // SIZE % N, place // SIZE // N
        whole = whole_ptr + row * WHOLE
        state = tl.load(state_ptr + place // SIZE, mask=inside, other=0)
        carries = tl.load(whole + CARRIES, mask=inside, other=0) > 0
        after = tl.load(state_ptr + place // SIZE + 1, mask=inside & (slot + 1 < N), other=0)
        carries = carries & (state == 2) & (after != 2) & (place % SIZE == 0) & (slot < SLOTS)
        if ALL:
            asked = inside & (slot < SLOTS)
        else:
            revises = tl.load(whole + EDITS, mask=inside, other=0) + tl.load(whole + SOFTENS, mask=inside, other=0)
            masked = tl.load(masked_ptr + place, mask=inside, other=0) != 0
            editable = tl.load(editable_ptr + place, mask=inside, other=0) != 0
            asked = (masked | (revises > 0)) & editable & (state == 1) & inside & (slot < SLOTS)
            asked = asked | carries
        number = listed + tl.cumsum(asked.to(tl.int32), 0) - 1
        asked = asked & (number < A)
        listed += tl.sum(asked.to(tl.int32), 0)
        tl.store(asked_ptr + place, tl.where(asked, number, -1), mask=inside)
        tl.store(at_ptr + number, place.to(tl.int64), mask=asked)
        token = (row * SLOTS + slot) * SIZE + place % SIZE
        if SHIFT:
            before = tl.where((slot == 0) & (place % SIZE == 0), tokens + row, token - 1)
            token = tl.where(carries, token + SIZE - 1, before)
        tl.store(logits_at_ptr + number, token.to(tl.int64), mask=asked)
    for first in range(0, A, BLOCK):
        number = first + step
        padding = (number >= listed) & (number < A)
        tl.store(at_ptr + number, tl.full((BLOCK,), 0, tl.int64) + total, mask=padding)
        tl.store(logits_at_ptr + number, tl.full((BLOCK,), 0, tl.int64), mask=padding)


OPEN = Kernel(_open_kernel, parts=(_progress, _lay_out), changing=["R", "table_row", "P"])
LIST = Kernel(_list_kernel, parts=(_progress, _lay_out), changing=["R", "A"])


def open_step(
    memory: BufferMemory, tables_RP: Tensor, *, num_slots: int, num_asked: int | None, page_size: int, shift: bool
) -> OpenStep:
    """Activate slots and lay out the first `num_slots` of every row, with logits at the first `num_asked` positions
    that can change (`None`: at all); with `shift` the logits of the position before predict a token.

    Nothing is read on the host and every shape depends on the arguments' alone, so a CUDA graph can capture the call.
    """
    rows, slots, size = memory.tokens_RNB.shape
    device, count, width = memory.device, rows * num_slots, tables_RP.shape[1]
    assert tables_RP.stride(1) == 1
    report_X = memory.new_report()
    tokens_T, positions_T, write_loc_T = torch.empty((3, count * size), dtype=torch.int64, device=device).unbind()
    bounds = torch.empty(count + 1, dtype=torch.int32, device=device)
    kv_lens_K = torch.empty(count, dtype=torch.int32, device=device)
    pages_KP = torch.empty((count, width), dtype=torch.int32, device=device)
    live_T = torch.empty(count * size, dtype=torch.bool, device=device)
    names = ("first_block", "origin", "end", "limit", "kept", "eos_stops", "tau_add", "tau_stable")
    block = power_of_two(size)
    launch(
        OPEN,
        (rows,),
        memory.tokens_RNB,
        memory.masked_RNB,
        memory.state_RN,
        memory.stability_RN,
        memory.positions_RNB,
        memory.editable_RNB,
        memory.num_editable_RN,
        memory.whole_RI,
        memory.real_RF,
        memory.max_blocks,
        memory.eos,
        tables_RP,
        report_X,
        tokens_T,
        positions_T,
        bounds,
        kv_lens_K,
        pages_KP,
        write_loc_T,
        live_T,
        rows,
        tables_RP.stride(0),
        width,
        len(memory.eos),
        N=slots,
        SLOTS=num_slots,
        SIZE=size,
        PAGE=page_size,
        **memory.places(*names),
        BLOCK=block,
        PAGES=_PAGES,
        num_warps=max(1, min(4, block // 32)),
    )
    at_A = logits_at_A = asked_RNB = None
    if num_asked is not None or shift or num_slots < slots:
        asked = count * size if num_asked is None else num_asked
        at_A, logits_at_A = torch.empty((2, asked), dtype=torch.int64, device=device).unbind()
        asked_RNB = torch.empty((rows, slots, size), dtype=torch.int32, device=device)
        constants = memory.places("carries", "edits", "softens")
        del constants["REAL"]
        launch(
            LIST,
            (1,),
            memory.masked_RNB,
            memory.editable_RNB,
            memory.state_RN,
            memory.whole_RI,
            at_A,
            logits_at_A,
            asked_RNB,
            rows,
            asked,
            N=slots,
            SLOTS=num_slots,
            SIZE=size,
            **constants,
            ALL=num_asked is None,
            SHIFT=shift,
            BLOCK=_LISTED,
            num_warps=_LIST_WARPS,
        )
    return OpenStep(
        report_X=report_X,
        tokens_T=tokens_T,
        positions_T=positions_T,
        cu_seqlens_q=bounds,
        kv_lens_K=kv_lens_K,
        pages_KP=pages_KP,
        write_loc_T=write_loc_T,
        live_T=live_T,
        logits_at_A=logits_at_A,
        at_A=at_A,
        asked_RNB=asked_RNB,
    )
