"""The attention of training: FlexAttention under a block mask on a GPU, a dense mask or groups elsewhere, from one
predicate.

A dense mask computes every pair of tokens, so the shared clean stream costs more than separate sequences if these are
long. A block mask skips the pairs between layouts (benchmarks/README.md has the counts), and so do the groups of
`streams` (`stream_attention.py`), which learners of rollouts use on a CPU.
"""

from collections import OrderedDict
from hashlib import sha256
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mbd_core.models.layer_parts import Attend
from mbd_core.multitf.config import AttentionChoice
from mbd_core.multitf.states.mask import dual_stream_mask, dual_stream_sees, whole_sequence_mask, whole_sequence_sees
from mbd_core.multitf.states.sample import MultiTFBatch
from mbd_core.multitf.states.stream_attention import StreamAttention
from mbd_core.ops.attention.whole import DenseAttention, FlexAttention, block_mask

KEPT_MASKS = 32
"""The number of cached block masks, one for each layout shape, the least recent dropped first."""


class TrainingAttention:
    """The attention of a run: FlexAttention under a block mask on a GPU, a dense mask or groups elsewhere.

    A block mask is built once for each layout shape: the streams, blocks and noise-groups of a batch's tokens. Raises
    `ValueError` for `flex` on a device where it has no gradients.
    """

    def __init__(self, choice: AttentionChoice, device: torch.device) -> None:
        if choice == "flex" and device.type != "cuda":
            raise ValueError(f"attention=flex trains on a GPU alone, and this device is {device.type}; choose dense")
        self.kind: Literal["dense", "flex", "streams"]
        self.kind = choice if choice != "auto" else "flex" if device.type == "cuda" else "dense"
        self._is_choice = choice != "auto"
        self._masks: OrderedDict[bytes, BlockMask] = OrderedDict()

    def describe(self) -> str:
        """The kind of attention and its reason, for the first line of a run."""
        if self._is_choice:
            return f"{self.kind} attention, as asked"
        return "flex attention" if self.kind == "flex" else "dense attention (flex needs a GPU)"

    def of(
        self, batch: MultiTFBatch, *, whole: bool = False, num_layers: int = 0, kept: Tensor | None = None
    ) -> Attend:
        """The attention of one batch: the Group-Aware Dual-Stream Mask, or with `whole` only the padding's mask.

        `kept` (N) are the flat places of the tokens that the last of `num_layers` layers must compute; `None`: all.
        """
        if self.kind == "flex":
            return FlexAttention(self._block_mask(batch, whole=whole))
        sample = places_of_samples(batch)
        if self.kind == "streams" and not whole:
            return StreamAttention(batch, sample, num_layers=num_layers, kept=kept)
        numbers = (batch.stream, batch.block, batch.first)
        mask = whole_sequence_mask(batch.stream, sample) if whole else dual_stream_mask(*numbers, sample)
        return DenseAttention(mask[:, None])

    def _block_mask(self, batch: MultiTFBatch, *, whole: bool) -> BlockMask:
        numbers = (batch.stream, batch.block, batch.first, places_of_samples(batch))
        content = torch.stack(numbers).cpu().numpy().tobytes()
        key = sha256(content + bytes([whole]) + str((*batch.stream.shape, batch.stream.device)).encode()).digest()
        if key not in self._masks:
            sees = whole_sequence_sees(batch.stream, numbers[-1]) if whole else dual_stream_sees(*numbers)
            samples, length = batch.stream.shape
            self._masks[key] = block_mask(sees, batch=samples, length=length, device=batch.stream.device)
            if len(self._masks) > KEPT_MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(key)
        return self._masks[key]


def places_of_samples(batch: MultiTFBatch) -> Tensor:
    """Each token's sample (S, L), numbered by its place in the row from 0. Batches of one shape give equal numbers."""
    places = torch.zeros_like(batch.sample)
    places[:, 1:] = (batch.sample[:, 1:] != batch.sample[:, :-1]).cumsum(-1)
    return places
