"""The experts that a forward routed its tokens to, if a request asks for them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mbd_core.engine.sequences.sequence import SequenceState
from mbd_core.engine.step.batch import Batch


def experts_of(
    sequences: Sequence[SequenceState], batch: Batch, calls: Sequence[Sequence[Tensor]]
) -> list[tuple[SequenceState, int, np.ndarray]]:
    """For each sequence of a forward the first position of its tokens, and their experts (T, M, K), uint8 or uint16.

    `calls` are the recorded calls of `recorded_experts`. The sequences share no page, so a sequence's first page
    identifies its tokens.
    """
    ids_TMK = torch.stack([torch.cat(list(own)) for own in calls], dim=1).cpu()
    lengths_K = batch.cu_seqlens_q.diff().long()
    page_T = batch.pages_KP[:, 0].repeat_interleave(lengths_K).cpu()
    positions_T = batch.positions_T.cpu()
    found = []
    for sequence in sequences:
        at_T = page_T == (sequence.pages[0] if sequence.pages else -1)
        if not at_T.any():
            continue
        own = positions_T[at_T].numpy()
        assert (np.diff(own) == 1).all(), "a sequence's tokens in a forward are neighbours"
        ids = ids_TMK[at_T].numpy()
        found.append((sequence, int(own[0]), ids.astype(np.uint8 if ids.max() < 256 else np.uint16)))
    return found
