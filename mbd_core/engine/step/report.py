"""The report of a decode step to the host: one float64 tensor, one copy.

Shape legend: R rows (sequences), N slots, B block size, X elements of a report, A positions with logits, K tokens.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.blocks.acceptance import placed_tops
from mbd_core.decoding.blocks.block_buffer import BlockBuffer, Commit


@dataclass(frozen=True)
class StepReport:
    """A step on the host, by row: views of the float64 array in which it came.

    `storing_only_R`, `states_RN` and `mask_ratio_RN` show the buffer as the forward saw it, the other fields its
    results. `num_resident_R` counts the blocks that stayed, `num_asked_R` their positions that still need logits.
    """

    packed_X: np.ndarray
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
    """The buffer as a forward sees it, copied before the step changes it: storing only (R,), states and mask ratios
    (R, N)."""

    storing_only_R: Tensor
    states_RN: Tensor
    mask_ratio_RN: Tensor


def view_of(buffer: BlockBuffer) -> StepView:
    return StepView(~buffer.active_RN.any(-1), buffer.state_RN.clone(), 1.0 - buffer.progress_RN)


def pack_report(view: StepView, commit: Commit, buffer: BlockBuffer) -> Tensor:
    """A step's report as one float64 tensor (X,), in the order of the parts of `StepReport`. float64 holds token ids
    and counts exactly."""
    parts = (
        commit.num_blocks_R,
        buffer.resident_RN.sum(-1),
        buffer.asked_RNB.flatten(1).sum(-1),
        view.storing_only_R,
        view.states_RN,
        view.mask_ratio_RN,
        commit.accepted_RN,
        commit.edited_RN,
        commit.tokens_RNB,
        commit.masked_RNB,
        commit.confidence_RNB,
    )
    return torch.cat([part.flatten() for part in parts])  # float64, as the mask ratios are


def with_tops(report_X: Tensor, tops_A2K: Tensor | None, at_A: Tensor | None, buffer: BlockBuffer) -> Tensor:
    """A packed report, followed by the likeliest tokens of each place of the buffer if the step reports them."""
    if tops_A2K is None:
        return report_X
    tops = placed_tops(tops_A2K, at_A, num_places=buffer.masked_RNB.numel())
    return torch.cat((report_X, tops.double().flatten()))


def report_width(num_slots: int, block_size: int) -> int:
    """Numbers of a report for each row."""
    return 4 + num_slots * (4 + 3 * block_size)


class HostCopy:
    """A packed report on its way to the host; begun at once, waited for when it is read."""

    def __init__(self, packed_X: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host_X = packed_X
        if packed_X.is_cuda:
            self._host_X = torch.empty(packed_X.shape, dtype=packed_X.dtype, pin_memory=True)
            self._host_X.copy_(packed_X, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed_X.device))

    def read(self, *, shape: tuple[int, int, int]) -> tuple[StepReport, np.ndarray | None]:
        """Waits for the report; returns it and any likeliest tokens (R, N, B, 2K). `shape` is (R, N, B)."""
        if self._event is not None:
            self._event.synchronize()
        host_X, (num_rows, num_slots, block_size) = self._host_X.numpy(), shape
        tops = host_X[num_rows * report_width(num_slots, block_size) :]
        report = unpack_report(host_X[: len(host_X) - len(tops)], num_slots=num_slots, block_size=block_size)
        return report, tops.reshape(*shape, -1) if len(tops) else None


def unpack_report(host_X: np.ndarray, *, num_slots: int, block_size: int) -> StepReport:
    """The parts of a report (X,), by name."""
    num_rows = len(host_X) // report_width(num_slots, block_size)
    rows, slots, positions = (num_rows,), (num_rows, num_slots), (num_rows, num_slots, block_size)
    offset = 0

    def take(shape: tuple[int, ...]) -> np.ndarray:
        nonlocal offset
        offset += (count := math.prod(shape))
        return host_X[offset - count : offset].reshape(shape)

    return StepReport(
        packed_X=host_X,
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
