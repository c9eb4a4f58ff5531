# mypy: disable-error-code="import-not-found, no-untyped-def, attr-defined"
"""The Block Buffer's work after a forward as Triton kernels: tokens are accepted, blocks leave, the step is reported.

They do what `BlockBuffer.commit` and `engine.report.pack_report` do, to the bit. A program takes one sequence, slot by
slot. The first kernel decides (`_settle_kernel`) and writes tokens, masks and confidences into the report and the
slots' other state into scratch memory; the second (`_slide_kernel`) reads them from there and moves the slots forward.

Shape legend: R rows (sequences), N slots, B block size, A positions with logits, X numbers of a report.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mbd_core.ops.buffer.before_forward import BufferMemory, OpenStep
from mbd_core.ops.launch import Kernel, launch, power_of_two

tl: Any = None  # triton.language, set when a kernel is compiled


def _predicted(
    asked_ptr, new_token_ptr, new_confidence_ptr, score_ptr, place, packed, inside, leftmost, at, LISTED: tl.constexpr
):
    """The token, confidence and score of a slot's positions, zero where there are no logits. NaN ranks first."""
    source = tl.load(asked_ptr + place, mask=inside, other=-1) if LISTED else packed
    token = tl.load(new_token_ptr + source, mask=source >= 0, other=0)
    confidence = tl.load(new_confidence_ptr + source, mask=source >= 0, other=0.0)
    score = tl.load(score_ptr + source, mask=source >= 0, other=0.0)
    score = tl.where(leftmost, (-at).to(tl.float32), score)
    return token, confidence, tl.where(score != score, float("inf"), score)


def _accepted(
    can, over, score, at, gate, quota, softens, QUOTAS: tl.constexpr, REVISES: tl.constexpr, BLOCK: tl.constexpr
):
    """The open positions `can` that become tokens: `accept_m2t`, or for rows that soften `accept_from_left`."""
    score = tl.where(can, score, float("-inf"))
    if QUOTAS:
        ahead = score[None, :] > score[:, None]
        earlier = (score[None, :] == score[:, None]) & (at[None, :] < at[:, None])
        best = can & (tl.sum((ahead | earlier).to(tl.int32), 1) < quota)
    else:
        first = tl.min(tl.where(score == tl.max(score, 0), at, BLOCK), 0)
        best = can & (at == first)
    accepted = can & over
    short = tl.sum(accepted.to(tl.int32), 0) < quota
    accepted = tl.where(short & gate, best, accepted)
    if REVISES:
        closed = tl.cumsum(((over == 0) & can).to(tl.int32), 0)
        first_open = can & (tl.cumsum(can.to(tl.int32), 0) == 1)
        accepted = tl.where(softens, (can & (closed == 0)) | (first_open & gate), accepted)
    return accepted


def _low_entropy(can, score, at, gate, gamma, jetengine, UNITS: tl.constexpr, MOST: tl.constexpr):
    """The open positions `can` that `accept_by_entropy` accepts."""
    entropy = tl.minimum(tl.maximum(-score * UNITS, 0.0), MOST).to(tl.int32)
    ahead = entropy[None, :] < entropy[:, None]
    earlier = (entropy[None, :] == entropy[:, None]) & (at[None, :] < at[:, None])
    ahead = (ahead | earlier) & can[None, :]
    before = tl.sum(tl.where(ahead, entropy[None, :], 0), 1)
    total = before + entropy
    gamma = gamma * UNITS
    within = tl.where(jetengine, total < gamma, tl.where(gate, before, total) <= gamma)
    return can & (within | (gate & (tl.sum(ahead.to(tl.int32), 1) == 0)))


def _decide(
    state,
    token,
    masked,
    editable,
    confidence,
    new_token,
    new_confidence,
    score,
    num_steps,
    stability,
    gate,
    was_complete,
    quota,
    whole,
    real,
    at,
    SIZE: tl.constexpr,
    REVISES: tl.constexpr,
    QUOTAS: tl.constexpr,
    PARTS: tl.constexpr,
    ENTROPY_RULE: tl.constexpr,
    JETENGINE: tl.constexpr,
    UNITS: tl.constexpr,
    MOST: tl.constexpr,
    GAMMA: tl.constexpr,
    SUB_BLOCK: tl.constexpr,
    EDITS: tl.constexpr,
    MAX_EDITS: tl.constexpr,
    SOFTENS: tl.constexpr,
    TAU_M2T: tl.constexpr,
    TAU_T2T: tl.constexpr,
    STOP_CONFIDENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slot after a forward: its tokens, masks, confidences and counters, which positions were accepted and edited,
    whether it is final, and whether the forward stored it."""
    active, final, stored = state == 1, state != 0, state == 2
    edits, softens = tl.load(whole + EDITS) > 0, tl.load(whole + SOFTENS) > 0
    sureness = new_confidence.to(tl.float64)
    can, filled = masked & editable & active, (masked == 0) & editable & active
    if PARTS:
        part = at // tl.maximum(tl.load(whole + SUB_BLOCK), 1).to(tl.int32)
        can = can & (part == tl.min(tl.where(can, part, BLOCK), 0))
    accepted = _accepted(
        can, sureness > tl.load(real + TAU_M2T), score, at, gate, quota, softens, QUOTAS, REVISES, BLOCK
    )
    if QUOTAS:
        rule = tl.load(whole + ENTROPY_RULE)
        low = _low_entropy(can, score, at, gate, tl.load(real + GAMMA), rule == JETENGINE, UNITS, MOST)
        accepted = tl.where(rule > 0, low, accepted)
    written, rated, edited = accepted, accepted, at < 0
    if REVISES:
        same = new_token == token
        edited = filled & (same == 0) & (sureness > tl.load(real + TAU_T2T))
        written = accepted | edited
        rated = written | (filled & softens)
        confirmed = tl.sum((filled & same).to(tl.int32), 0).to(tl.float64)
        num_filled = tl.sum(filled.to(tl.int32), 0).to(tl.float64)
        stability = tl.where(active & (num_filled > 0.0), confirmed / tl.maximum(num_filled, 1.0), 1.0)
        num_steps += (active & (softens | was_complete)).to(tl.int64)
    confidence = tl.where(rated, new_confidence, confidence)
    token = tl.where(written, new_token, token)
    masked = masked & (accepted == 0)
    final = final & (tl.sum((masked & editable).to(tl.int32), 0) == 0)
    if REVISES:
        changed = tl.sum(written.to(tl.int32), 0) > 0
        capped = was_complete & changed & (num_steps >= tl.load(whole + MAX_EDITS))
        unsure = editable & ((confidence.to(tl.float64) >= tl.load(real + STOP_CONFIDENCE)) == 0)
        steady = (tl.sum(unsure.to(tl.int32), 0) == 0) | (changed == 0) | (num_steps >= SIZE)
        final = stored | (final & tl.where(edits, capped, (softens == 0) | steady))
        stored = stored | (active & was_complete & (changed == 0) & edits)
    return token, masked, confidence, num_steps, stability, accepted, edited, final, stored


def _write(
    report_ptr,
    new_weight_ptr,
    kept_ptr,
    R,
    here,
    place,
    inside,
    token,
    masked,
    confidence,
    weight,
    state,
    num_steps,
    stability,
    accepted,
    edited,
    N: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One slot's part of the report, and what of it the report does not hold."""
    tl.store(new_weight_ptr + place, weight, mask=inside)
    tl.store(kept_ptr + here * 3, state.to(tl.float64))
    tl.store(kept_ptr + here * 3 + 1, num_steps.to(tl.float64))
    tl.store(kept_ptr + here * 3 + 2, stability)
    counts = report_ptr + 4 * R + 2 * R * N + here
    tl.store(counts, tl.sum(accepted.to(tl.int32), 0).to(tl.float64))
    tl.store(counts + R * N, tl.sum(edited.to(tl.int32), 0).to(tl.float64))
    part = report_ptr + 4 * R + 4 * R * N + place
    tl.store(part, token.to(tl.float64), mask=inside)
    tl.store(part + R * N * SIZE, masked.to(tl.float64), mask=inside)
    tl.store(part + 2 * R * N * SIZE, confidence.to(tl.float64), mask=inside)


def _settle_kernel(
    tokens_ptr,
    masked_ptr,
    confidence_ptr,
    weight_ptr,
    state_ptr,
    num_steps_ptr,
    stability_ptr,
    editable_ptr,
    num_editable_ptr,
    whole_ptr,
    real_ptr,
    asked_ptr,
    new_token_ptr,
    new_confidence_ptr,
    score_ptr,
    report_ptr,
    new_weight_ptr,
    kept_ptr,
    num_blocks_ptr,
    R,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    REVISES: tl.constexpr,
    QUOTAS: tl.constexpr,
    PARTS: tl.constexpr,
    LEFTMOST: tl.constexpr,
    JETENGINE: tl.constexpr,
    UNITS: tl.constexpr,
    MOST: tl.constexpr,
    WHOLE: tl.constexpr,
    REAL: tl.constexpr,
    QUOTA: tl.constexpr,
    ENTROPY_RULE: tl.constexpr,
    FALLBACK: tl.constexpr,
    SUB_BLOCK: tl.constexpr,
    EDITS: tl.constexpr,
    MAX_EDITS: tl.constexpr,
    SOFTENS: tl.constexpr,
    FORWARD: tl.constexpr,
    TAU_SEMI: tl.constexpr,
    TAU_M2T: tl.constexpr,
    GAMMA: tl.constexpr,
    TAU_T2T: tl.constexpr,
    STOP_CONFIDENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One sequence: Alg. 5 lines 10 to 20, and what the report says of it. Every slot reads the state before."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < SIZE
    whole, real = whole_ptr + row * WHOLE, real_ptr + row * REAL
    quota = tl.load(whole + QUOTA).to(tl.int32) if QUOTAS else 1
    leftmost = tl.load(whole + FALLBACK) == LEFTMOST
    before = tl.full((), 0.0, tl.float64)  # the progress of the slot before
    stores, settles = 1, 1  # whether all slots so far are stored, and final
    num_blocks, num_resident = 0, 0
    carried = kept_ptr + R * N * 3 + row * 2
    for slot in range(N):
        here = row * N + slot
        place = here * SIZE + at
        state = tl.load(state_ptr + here).to(tl.int32)
        token = tl.load(tokens_ptr + place, mask=inside, other=0)
        masked = tl.load(masked_ptr + place, mask=inside, other=0) != 0
        editable = tl.load(editable_ptr + place, mask=inside, other=0) != 0
        confidence = tl.load(confidence_ptr + place, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + place, mask=inside, other=1.0)
        num_steps, stability = tl.load(num_steps_ptr + here), tl.load(stability_ptr + here)
        packed = tl.where(inside & (slot < SLOTS), (row * SLOTS + slot) * SIZE + at, -1)
        new_token, new_confidence, score = _predicted(
            asked_ptr, new_token_ptr, new_confidence_ptr, score_ptr, place, packed, inside, leftmost, at, LISTED
        )
        left = tl.sum((masked & editable).to(tl.int32), 0)
        gate = (slot == 0) | (before >= tl.load(real + TAU_SEMI))
        before = 1.0 - left.to(tl.float64) / tl.maximum(tl.load(num_editable_ptr + here), 1.0)
        token, masked, confidence, num_steps, stability, accepted, edited, final, stored = _decide(
            state,
            token,
            masked,
            editable,
            confidence,
            new_token,
            new_confidence,
            score,
            num_steps,
            stability,
            gate,
            (state != 0) & (left == 0),
            quota,
            whole,
            real,
            at,
            SIZE,
            REVISES,
            QUOTAS,
            PARTS,
            ENTROPY_RULE,
            JETENGINE,
            UNITS,
            MOST,
            GAMMA,
            SUB_BLOCK,
            EDITS,
            MAX_EDITS,
            SOFTENS,
            TAU_M2T,
            TAU_T2T,
            STOP_CONFIDENCE,
            BLOCK,
        )
        settles, stores = settles * final.to(tl.int32), stores * stored.to(tl.int32)
        num_blocks, num_resident = num_blocks + stores, num_resident + (state != 0).to(tl.int32)
        if PARTS:  # what the last block that is stored predicts behind itself
            tl.store(carried + at, new_token.to(tl.float64), mask=(at == 0) & (stores > 0))
            tl.store(carried + 1 + at, new_confidence.to(tl.float64), mask=(at == 0) & (stores > 0))
        if REVISES:
            mixed = (tl.load(whole + SOFTENS) > 0) & (state == 1) & (settles == 0) & editable & (masked == 0)
            weight = tl.where(mixed, confidence, 1.0)
        state = tl.where(settles > 0, 2, state)
        _write(
            report_ptr,
            new_weight_ptr,
            kept_ptr,
            R,
            here,
            place,
            inside,
            token,
            masked,
            confidence,
            weight,
            state,
            num_steps,
            stability,
            accepted,
            edited,
            N,
            SIZE,
        )
    tl.store(num_blocks_ptr + row, num_blocks.to(tl.int64))
    tl.store(whole + FORWARD, tl.load(whole + FORWARD) + (num_resident > 0).to(tl.int64))


def _slide_kernel(
    tokens_ptr,
    masked_ptr,
    confidence_ptr,
    weight_ptr,
    state_ptr,
    num_steps_ptr,
    stability_ptr,
    positions_ptr,
    editable_ptr,
    num_editable_ptr,
    whole_ptr,
    report_ptr,
    new_weight_ptr,
    kept_ptr,
    num_blocks_ptr,
    R,
    mask_token,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    ORIGIN: tl.constexpr,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    CARRIES: tl.constexpr,
    EDITS: tl.constexpr,
    SOFTENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One sequence: its slots move forward by the stored blocks, and what follows from where they then stand."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    whole = whole_ptr + row * WHOLE
    num_blocks = tl.load(num_blocks_ptr + row)
    first = tl.load(whole + FIRST_BLOCK) + num_blocks
    begin, end = tl.load(whole + BEGIN), tl.load(whole + END)
    revises = (tl.load(whole + EDITS) + tl.load(whole + SOFTENS)) > 0
    part = report_ptr + 4 * R + 4 * R * N
    num_resident, num_asked, carries = 0, 0, 0
    for slot in range(N):
        here = row * N + slot
        place = here * SIZE + at
        source = slot + num_blocks.to(tl.int32)
        lives = source < N
        from_slot = row * N + tl.minimum(source, N - 1)
        from_place = from_slot * SIZE + at
        some = inside & lives
        token = tl.load(part + from_place, mask=some, other=0.0).to(tl.int64)
        token = tl.where(lives, token, mask_token)
        masked = tl.load(part + R * N * SIZE + from_place, mask=some, other=1.0) != 0.0
        confidence = tl.load(part + 2 * R * N * SIZE + from_place, mask=some, other=0.0)
        weight = tl.load(new_weight_ptr + from_place, mask=some, other=1.0)
        state = tl.load(kept_ptr + from_slot * 3, mask=lives, other=0.0).to(tl.int32)
        num_steps = tl.load(kept_ptr + from_slot * 3 + 1, mask=lives, other=0.0)
        stability = tl.load(kept_ptr + from_slot * 3 + 2, mask=lives, other=1.0)
        position = tl.load(whole + ORIGIN) + (first + slot) * SIZE + at
        editable = inside & (position >= begin) & (position < end)
        if PARTS:
            fills = (tl.load(whole + CARRIES) > 0) & (slot == 0) & (num_blocks > 0)
            opens = (at == 0) & masked & editable & fills
            carried = kept_ptr + R * N * 3 + row * 2
            token = tl.where(opens, tl.load(carried + at, mask=opens, other=0.0).to(tl.int64), token)
            confidence = tl.where(opens, tl.load(carried + 1 + at, mask=opens, other=0.0), confidence)
            masked = masked & (opens == 0)
            filled = tl.sum(opens.to(tl.int32), 0) > 0
            complete = tl.sum((masked & editable).to(tl.int32), 0) == 0
            state = tl.where(filled & complete & (state != 0), 2, state)
        tl.store(tokens_ptr + place, token, mask=inside)
        tl.store(masked_ptr + place, masked, mask=inside)
        tl.store(confidence_ptr + place, confidence.to(tl.float32), mask=inside)
        tl.store(weight_ptr + place, weight, mask=inside)
        tl.store(state_ptr + here, state.to(tl.int8))
        tl.store(num_steps_ptr + here, num_steps.to(tl.int64))
        tl.store(stability_ptr + here, stability)
        tl.store(positions_ptr + place, position, mask=inside)
        tl.store(editable_ptr + place, editable, mask=inside)
        tl.store(num_editable_ptr + here, tl.sum(editable.to(tl.int32), 0).to(tl.float64))
        num_resident += (state != 0).to(tl.int32)
        num_asked += tl.sum(((masked | revises) & editable & (state == 1)).to(tl.int32), 0)
        if PARTS:
            carries = tl.where(state == 2, 1, carries)
    if PARTS:
        num_asked += tl.where(tl.load(whole + CARRIES) > 0, carries, 0)
    tl.store(whole + FIRST_BLOCK, first)
    tl.store(report_ptr + row, num_blocks.to(tl.float64))
    tl.store(report_ptr + R + row, num_resident.to(tl.float64))
    tl.store(report_ptr + 2 * R + row, num_asked.to(tl.float64))


SETTLE = Kernel(_settle_kernel, parts=(_predicted, _accepted, _low_entropy, _decide, _write), changing=["R"])
SLIDE = Kernel(
    _slide_kernel, parts=(_predicted, _accepted, _low_entropy, _decide, _write), changing=["R", "mask_token"]
)


def close_step(
    memory: BufferMemory,
    opened: OpenStep,
    token_A: Tensor,
    confidence_A: Tensor,
    score_A: Tensor,
    *,
    num_slots: int,
    leftmost: int,
    jetengine: int,
    entropy_units: tuple[float, float],
    revises: bool,
    quotas: bool,
    by_parts: bool,
) -> Tensor:
    """Commit the predictions at the positions of `opened`, slide, and complete its report; the number of blocks that
    left each row (R,) int64.

    `leftmost` and `jetengine` are the numbers of that fallback and that rule on entropies, `entropy_units` the unit in
    which these are summed and the most of one. `revises`, `quotas` and `by_parts` are those of `BlockBuffer.commit`.
    """
    rows, slots, size = memory.tokens_RNB.shape
    new_weight_RNB = torch.empty_like(memory.weight_RNB)
    kept = torch.empty(rows * (slots * 3 + 2), dtype=torch.float64, device=memory.device)
    num_blocks_R = torch.empty(rows, dtype=torch.int64, device=memory.device)
    names = (
        "quota",
        "entropy_rule",
        "fallback",
        "sub_block",
        "edits",
        "max_edits",
        "softens",
        "forward",
        "tau_semi",
        "tau_m2t",
        "gamma",
        "tau_t2t",
        "stop_confidence",
    )
    block = power_of_two(size)
    options = {"BLOCK": block, "num_warps": max(1, min(4, block // 32))}
    launch(
        SETTLE,
        (rows,),
        memory.tokens_RNB,
        memory.masked_RNB,
        memory.confidence_RNB,
        memory.weight_RNB,
        memory.state_RN,
        memory.num_steps_RN,
        memory.stability_RN,
        memory.editable_RNB,
        memory.num_editable_RN,
        memory.whole_RI,
        memory.real_RF,
        num_blocks_R if opened.asked_RNB is None else opened.asked_RNB,
        token_A,
        confidence_A,
        score_A,
        opened.report_X,
        new_weight_RNB,
        kept,
        num_blocks_R,
        rows,
        N=slots,
        SLOTS=num_slots,
        SIZE=size,
        LISTED=opened.asked_RNB is not None,
        REVISES=revises,
        QUOTAS=quotas,
        PARTS=by_parts,
        LEFTMOST=leftmost,
        JETENGINE=jetengine,
        UNITS=entropy_units[0],
        MOST=entropy_units[1],
        **memory.places(*names),
        **options,
    )
    constants = memory.places("first_block", "origin", "begin", "end", "carries", "edits", "softens")
    del constants["REAL"]
    launch(
        SLIDE,
        (rows,),
        memory.tokens_RNB,
        memory.masked_RNB,
        memory.confidence_RNB,
        memory.weight_RNB,
        memory.state_RN,
        memory.num_steps_RN,
        memory.stability_RN,
        memory.positions_RNB,
        memory.editable_RNB,
        memory.num_editable_RN,
        memory.whole_RI,
        opened.report_X,
        new_weight_RNB,
        kept,
        num_blocks_R,
        rows,
        memory.mask_token_id,
        N=slots,
        SIZE=size,
        PARTS=by_parts,
        **constants,
        **options,
    )
    return num_blocks_R
