"""What a decode step tells the host in one copy: the report, when each position was written, what changed.

Shape legend: R rows (sequences), N slots, B block size, X columns.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.blocks.acceptance import placed_tops
from mbd_core.decoding.blocks.arrays import array_of, concat, copy_of, tensor_of
from mbd_core.decoding.blocks.block_buffer import BlockBuffer, Commit
from mbd_core.decoding.blocks.request import Edit, Frame, FrameSlot, Request, Rollout, SlotState, TopTokens

# What one decode step tells the host: one array, one copy.


@dataclass(frozen=True)
class Report:
    """A step by row: on a CPU the arrays that the step made, else views of the float64 array in which it came.

    `storing_only_R`, `states_RN` and `mask_ratio_RN` are what the forward saw, the rest is what it did. Of the blocks
    that stayed, `num_resident_R` is the number, and `num_asked_R` that of their positions that still need logits.
    """

    num_blocks_R: np.ndarray
    num_resident_R: np.ndarray
    num_asked_R: np.ndarray
    storing_only_R: np.ndarray
    states_RN: np.ndarray
    mask_ratio_RN: np.ndarray
    accepted_RN: np.ndarray
    edited_RN: np.ndarray
    tokens_RNB: np.ndarray
    masked_RNB: np.ndarray
    confidence_RNB: np.ndarray


@dataclass(frozen=True)
class StepView:
    """What a forward sees of the buffer, kept from what the step changes: storing only (R,), states and progress
    (R, N)."""

    storing_only_R: Tensor
    states_RN: Tensor
    progress_RN: Tensor


def view_of(buffer: BlockBuffer) -> StepView:
    return StepView(~buffer.active_RN.any(-1), copy_of(buffer.state_RN), buffer.progress_RN)


def report_of(view: StepView, commit: Commit, buffer: BlockBuffer) -> Report:
    """What a step did, behind its commit."""
    parts: dict[str, Any] = {
        "num_blocks_R": commit.num_blocks_R,
        "num_resident_R": buffer.resident_RN.sum(-1),
        "num_asked_R": buffer.asked_RNB.sum(-1).sum(-1),
        "storing_only_R": view.storing_only_R,
        "states_RN": view.states_RN,
        "mask_ratio_RN": 1.0 - view.progress_RN,
        "accepted_RN": commit.accepted_RN,
        "edited_RN": commit.edited_RN,
        "tokens_RNB": commit.tokens_RNB,
        "masked_RNB": commit.masked_RNB,
        "confidence_RNB": commit.confidence_RNB,
    }
    return Report(**parts)


def pack_report(report: Report | Tensor) -> Tensor:
    """All of a step as one float64 tensor (X,), in the order of `unpack_report`; token ids and counts are exact in
    it."""
    if isinstance(report, Tensor):
        return report
    parts = [array_of(getattr(report, f.name)).reshape(-1) for f in fields(report)]
    return tensor_of(concat(parts))  # float64, as the mask ratios are


def with_tops(report_X: Tensor, tops_A2K: Tensor | None, at_A: Tensor | None, buffer: BlockBuffer) -> Tensor:
    """A packed report, and behind it, where there are any, the likeliest tokens of each place of the buffer."""
    if tops_A2K is None:
        return report_X
    tops = placed_tops(tops_A2K, at_A, num_places=buffer.masked_RNB.numel())
    return torch.cat((report_X, tops.double().flatten()))


def report_width(num_slots: int, block_size: int) -> int:
    """Numbers of a report for each row."""
    return 4 + num_slots * (4 + 3 * block_size)


class HostCopy:
    """A report on its way to the host, packed, or of a CPU's arrays; begun at once, waited for when it is read."""

    def __init__(self, report: Tensor | Report) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = report
        if isinstance(report, Tensor) and report.is_cuda:
            self._host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
            self._host.copy_(report, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(report.device))

    def read(self, *, shape: tuple[int, int, int]) -> tuple[Report, np.ndarray | None]:
        """The report, when it is there, and any likeliest tokens (R, N, B, 2K) behind it; `shape` is (R, N, B)."""
        if self._event is not None:
            self._event.synchronize()
        if isinstance(self._host, Report):
            return self._host, None
        num_rows, num_slots, block_size = shape
        host_X = self._host.numpy()
        tops = host_X[num_rows * report_width(num_slots, block_size) :]
        report = unpack_report(host_X[: len(host_X) - len(tops)], num_slots=num_slots, block_size=block_size)
        return report, tops.reshape(*shape, -1) if len(tops) else None


def unpack_report(host_X: np.ndarray, *, num_slots: int, block_size: int) -> Report:
    """A report (X,), its parts by name."""
    num_rows = len(host_X) // report_width(num_slots, block_size)
    rows, slots, positions = (num_rows,), (num_rows, num_slots), (num_rows, num_slots, block_size)
    offset = 0

    def take(shape: tuple[int, ...]) -> np.ndarray:
        nonlocal offset
        offset += (count := math.prod(shape))
        return host_X[offset - count : offset].reshape(shape)

    return Report(
        num_blocks_R=take(rows),
        num_resident_R=take(rows),
        num_asked_R=take(rows),
        storing_only_R=take(rows),
        states_RN=take(slots),
        mask_ratio_RN=take(slots),
        accepted_RN=take(slots),
        edited_RN=take(slots),
        tokens_RNB=take(positions),
        masked_RNB=take(positions),
        confidence_RNB=take(positions),
    )


# Which forward wrote each position of a sequence's resident blocks, kept on the host beside its buffer row.
#
# Shape legend: N slots, B block size.

OPEN = -1  # no forward has filled it


class StepMap:
    """The forwards of one sequence's slots. It moves as the slots do, and outlives a preemption as their row does.

    With `edits` it also keeps the tokens, and those that were overwritten. Positions that hold tokens of the prompt
    are in it too, with a number that is not read.
    """

    def __init__(self, num_slots: int, block_size: int, *, edits: bool = False) -> None:
        self._forward_NB = np.full((num_slots, block_size), OPEN, dtype=np.int64)
        self._tokens_NB = np.full_like(self._forward_NB, OPEN) if edits else None
        self._edits: list[Edit] = []  # by position, from the first that ever was in a slot
        self._num_taken = 0

    def update(self, tokens_NB: np.ndarray, masked_NB: np.ndarray, forward: int) -> None:
        """Forward number `forward` has left these tokens and masks; what it wrote gets its number."""
        if self._tokens_NB is not None:
            self._overwrite(self._tokens_NB, np.where(masked_NB, OPEN, tokens_NB).astype(np.int64), forward)
        self._forward_NB[~masked_NB & (self._forward_NB == OPEN)] = forward

    def _overwrite(self, old_NB: np.ndarray, new_NB: np.ndarray, forward: int) -> None:
        changed_NB = (old_NB != OPEN) & (new_NB != OPEN) & (old_NB != new_NB)
        places = (self._num_taken + np.flatnonzero(changed_NB)).tolist()
        edits = zip(places, self._forward_NB[changed_NB].tolist(), old_NB[changed_NB].tolist(), strict=True)
        self._edits += [Edit(place, step, token) for place, step, token in edits]
        self._forward_NB[changed_NB] = forward
        old_NB[:] = new_NB

    def mark(self, slot: int, offset: int, forward: int) -> None:
        """A position was filled before a forward: with number `forward`, or for 0 before all."""
        self._forward_NB[slot, offset] = forward

    def carry(self, forward: int) -> None:
        """The store of the blocks that have left filled the position behind them, if it was open."""
        if self._forward_NB[0, 0] == OPEN:
            self._forward_NB[0, 0] = forward

    def take(self, num_blocks: int) -> Rollout:
        """The steps and edits of the first blocks' positions, in order; those blocks leave the buffer."""
        steps = self._forward_NB[:num_blocks].ravel().tolist()
        rollout = Rollout(edits=tuple(self._edits)).without(self._num_taken)
        self._num_taken += len(steps)
        self._edits = [edit for edit in self._edits if edit.index >= self._num_taken]
        self._forward_NB = _slide(self._forward_NB, num_blocks)
        if self._tokens_NB is not None:
            self._tokens_NB = _slide(self._tokens_NB, num_blocks)
        return replace(rollout.cut((), len(steps), room=0), steps=tuple(steps))


class TopLog:
    """The likeliest tokens of each position of one sequence's slots, in the forward whose log-probability is reported
    of its token. It moves as the slots do, and outlives a preemption as their row does."""

    def __init__(self, request: Request, block_size: int) -> None:
        shape = (request.decoding.buffer_size, block_size)
        self._number, self._softens = request.top_logprobs, request.decoding.soft is not None
        self._tokens_NB = np.full(shape, OPEN, dtype=np.int64)
        self._tops_NB2K = np.full((*shape, 2), -1.0)

    def update(
        self, states_N: np.ndarray, tokens_NB: np.ndarray, masked_NB: np.ndarray, tops_NB2K: np.ndarray
    ) -> None:
        """A forward has left these tokens and masks, and predicted these likeliest tokens."""
        if self._tops_NB2K.shape != tops_NB2K.shape:
            self._tops_NB2K = np.full(tops_NB2K.shape, -1.0)
        tokens_NB = np.where(masked_NB, OPEN, tokens_NB).astype(np.int64)
        rated_NB = ~masked_NB & (tokens_NB != self._tokens_NB)
        if self._softens:
            rated_NB |= ~masked_NB & (states_N == SlotState.ACTIVE)[:, None]
        self._tops_NB2K[rated_NB] = tops_NB2K[rated_NB]
        self._tokens_NB = tokens_NB

    def take(self, num_blocks: int) -> list[TopTokens]:
        """Those of the first blocks' positions, in order; these blocks leave the buffer."""
        flat = self._tops_NB2K[:num_blocks].reshape(-1, self._tops_NB2K.shape[-1])
        ids, values = np.split(flat, 2, axis=1)
        self._tokens_NB = _slide(self._tokens_NB, num_blocks)
        self._tops_NB2K = np.concatenate((self._tops_NB2K[num_blocks:], self._tops_NB2K[:num_blocks]))
        return [
            tuple((int(i), v) for i, v in zip(*each, strict=True) if i >= 0 and v > -math.inf)
            for each in zip(ids[:, : self._number].tolist(), values[:, : self._number].tolist(), strict=True)
        ]


def _slide(values_NB: np.ndarray, num_blocks: int) -> np.ndarray:
    """Without the first blocks, and open ones at the end."""
    return np.concatenate((values_NB[num_blocks:], np.full_like(values_NB[:num_blocks], OPEN)))


# What changed in a sequence's slots from one forward to the next, kept on the host beside its buffer row.
#
# Shape legend: N slots, B block size.


class FrameLog:
    """The slots of one sequence as its last forward left them. They move as the slots do, and outlive a preemption as
    their row does."""

    def __init__(self, request: Request, block_size: int) -> None:
        shape = (request.decoding.buffer_size, block_size)
        self._request, self._num_slots = request, shape[0]
        self._tokens_NB, self._masked_NB = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=bool)
        self._offsets_NB = np.arange(shape[0] * shape[1]).reshape(shape)
        self._end = len(request.prompt) + request.max_tokens
        self._is_fixed = np.zeros(self._end, dtype=bool)  # by position: no forward fills or changes these
        self._is_fixed[: len(request.prompt) + len(request.committed)] = True
        for index, token in enumerate(request.template):
            self._is_fixed[len(request.prompt) + index] |= token is not None

    def frame(
        self,
        states_N: np.ndarray,
        tokens_NB: np.ndarray,
        masked_NB: np.ndarray,
        *,
        num_stored: int,
        start: int,
        forward: int,
    ) -> Frame:
        """The frame of forward number `forward`, which has left these tokens and masks in the slots from position
        `start` on, and stored the first `num_stored` of their blocks."""
        size, n = masked_NB.shape[-1], self._num_slots
        tokens_NB, masked_NB = tokens_NB[:n].astype(np.int64), masked_NB[:n].copy()
        positions_NB = start + self._offsets_NB
        inside_NB = positions_NB < self._end
        free_NB = inside_NB & ~self._is_fixed[np.minimum(positions_NB, self._end - 1)]
        filled_NB = free_NB & ~masked_NB
        accepted_NB = filled_NB & self._masked_NB
        edited_NB = filled_NB & ~self._masked_NB & (tokens_NB != self._tokens_NB)
        self._keep(tokens_NB, masked_NB, num_stored)
        next_position = start + num_stored * size
        if num_stored and self._request.carries and next_position < self._end:
            self._is_fixed[next_position] = True
        slots = []
        for slot in np.flatnonzero(states_N[:n] != SlotState.DUMMY).tolist():
            pairs = zip(tokens_NB[slot].tolist(), masked_NB[slot].tolist(), strict=True)
            state = SlotState.IN_CACHE if slot < num_stored else SlotState(int(states_N[slot]))
            slots.append(
                FrameSlot(
                    state=state.name,
                    tokens=tuple(None if m else t for t, m in pairs)[: min(size, int(inside_NB[slot].sum()))],
                    accepted=tuple(np.flatnonzero(accepted_NB[slot]).tolist()),
                    edited=tuple(np.flatnonzero(edited_NB[slot]).tolist()),
                )
            )
        return Frame(forward=forward, position=start - len(self._request.prompt), num_slots=n, slots=tuple(slots))

    def _keep(self, tokens_NB: np.ndarray, masked_NB: np.ndarray, num_stored: int) -> None:
        """What the next forward is compared with: stored blocks leave, the others move to the front."""
        self._tokens_NB[:], self._masked_NB[:] = 0, True
        num_left = self._num_slots - num_stored
        self._tokens_NB[:num_left], self._masked_NB[:num_left] = tokens_NB[num_stored:], masked_NB[num_stored:]
