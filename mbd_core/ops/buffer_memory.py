"""What the Block Buffer's kernels read and write, and where a step's report has its parts.

Shape legend: R rows (sequences), N slots, B block size, X numbers of a report, I and F columns of settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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
        """An empty report (X,), as `step_report.pack_report` lays one out."""
        rows, slots, size = self.tokens_RNB.shape
        return torch.empty(rows * (4 + slots * (4 + 3 * size)), dtype=torch.float64, device=self.device)
