"""What one decode step tells the host: one array, one copy.

Shape legend: R rows (sequences), N slots, B block size, X columns.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.buffer import BlockBuffer, Commit


@dataclass(frozen=True)
class Report:
    """A step on the host, by row: views of the float64 array it came in.

    `storing_only_R`, `states_RN` and `mask_ratio_RN` are what the forward saw, the rest is what it did; `num_asked_R`
    says how many positions' logits the next forward may ask for.
    """

    num_blocks_R: np.ndarray
    num_asked_R: np.ndarray
    storing_only_R: np.ndarray
    states_RN: np.ndarray
    mask_ratio_RN: np.ndarray
    accepted_RN: np.ndarray
    edited_RN: np.ndarray
    tokens_RNB: np.ndarray
    masked_RNB: np.ndarray
    confidence_RNB: np.ndarray


def before(buffer: BlockBuffer) -> Tensor:
    """What the forward will see: storing only, states, mask ratios (R, 1 + 2 N)."""
    storing_only = ~buffer.active_RN.any(-1, keepdim=True)
    return torch.cat((storing_only.double(), buffer.state_RN.double(), 1.0 - buffer.progress_RN), dim=1)


def pack_report(seen_RX: Tensor, commit: Commit, buffer: BlockBuffer) -> Tensor:
    """All of a step as one float64 tensor (R, X); token ids and counts are exact in it."""
    rows = torch.stack((commit.num_blocks_R, buffer.next_asked_R), dim=1)
    slots = (commit.accepted_RN, commit.edited_RN)
    positions = (commit.tokens_RNB, commit.masked_RNB, commit.confidence_RNB)
    parts = [seen_RX, rows, *slots, *(t.flatten(1) for t in positions)]
    return torch.cat([t.double() for t in parts], dim=1)


class HostCopy:
    """A packed report on its way to the host; begun at once, waited for when it is read."""

    def __init__(self, packed_RX: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host_RX = packed_RX
        if packed_RX.is_cuda:
            self._host_RX = torch.empty(packed_RX.shape, dtype=packed_RX.dtype, pin_memory=True)
            self._host_RX.copy_(packed_RX, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> np.ndarray:
        """The report (R, X), when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host_RX.numpy()


def unpack_report(host: np.ndarray, *, num_slots: int, block_size: int) -> Report:
    """A report (R, X), its parts by name."""
    at = 0

    def take(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return host[:, at - count : at]

    n, shape = num_slots, (len(host), num_slots, block_size)
    return Report(
        storing_only_R=take(1)[:, 0],
        states_RN=take(n),
        mask_ratio_RN=take(n),
        num_blocks_R=take(1)[:, 0],
        num_asked_R=take(1)[:, 0],
        accepted_RN=take(n),
        edited_RN=take(n),
        tokens_RNB=take(n * block_size).reshape(shape),
        masked_RNB=take(n * block_size).reshape(shape),
        confidence_RNB=take(n * block_size).reshape(shape),
    )
