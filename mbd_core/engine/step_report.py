"""What one decode step tells the host: one array, one copy.

Shape legend: R rows (sequences), N slots, B block size, X columns.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.block_buffer import BlockBuffer, Commit


@dataclass(frozen=True)
class Report:
    """A step on the host, by row: views of the float64 array it came in.

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
    """What a forward sees of the buffer, kept from what the step changes: storing only (R,), states and mask ratios
    (R, N)."""

    storing_only_R: Tensor
    states_RN: Tensor
    mask_ratio_RN: Tensor


def view_of(buffer: BlockBuffer) -> StepView:
    return StepView(~buffer.active_RN.any(-1), buffer.state_RN.clone(), 1.0 - buffer.progress_RN)


def pack_report(view: StepView, commit: Commit, buffer: BlockBuffer) -> Tensor:
    """All of a step as one float64 tensor (X,), part by part; token ids and counts are exact in it."""
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
    return torch.cat([part.double().flatten() for part in parts])


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

    def read(self) -> np.ndarray:
        """The report (X,), when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host_X.numpy()


def unpack_report(host_X: np.ndarray, *, num_slots: int, block_size: int) -> Report:
    """A report (X,), its parts by name."""
    num_rows = len(host_X) // (4 + num_slots * (4 + 3 * block_size))
    rows, slots, positions = (num_rows,), (num_rows, num_slots), (num_rows, num_slots, block_size)
    at = 0

    def take(shape: tuple[int, ...]) -> np.ndarray:
        nonlocal at
        at += (count := math.prod(shape))
        return host_X[at - count : at].reshape(shape)

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
