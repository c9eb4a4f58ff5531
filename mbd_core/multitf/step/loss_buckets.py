"""A run's loss by bucket: means over the labels of each slot of a noise-group, and of each part of the mask ratios.

A label's slot is the place of its block within its noise-group, from 1. Its mask ratio is the one drawn for its block.
Sums and counts travel as one row of numbers, so workers add theirs in one exchange.

Shape legend: N labels, K buckets.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_SLOTS = 8
"""The last slot holds all later slots too: a layout of one group has a slot for each of a response's blocks."""
NUM_RATIOS = 4
BUCKETS = tuple(f"loss_slot_{slot}" for slot in range(1, NUM_SLOTS + 1)) + tuple(
    f"loss_ratio_{100 * part // NUM_RATIOS}_{100 * (part + 1) // NUM_RATIOS}" for part in range(NUM_RATIOS)
)
"""The names of all buckets in logs; `loss_ratio_25_50` holds ratios above 0.25 and up to 0.5."""


def bucket_sums(losses_N: Tensor, slots_N: Tensor, ratios_N: Tensor) -> Tensor:
    """The sums of the losses in all buckets, then the numbers of labels: (2K) in float64. Slots count from 0."""
    slot_N = slots_N.clamp(0, NUM_SLOTS - 1)
    ratio_N = NUM_SLOTS + ((ratios_N * NUM_RATIOS).ceil().long() - 1).clamp(0, NUM_RATIOS - 1)
    sums = torch.zeros(2, len(BUCKETS), dtype=torch.float64, device=losses_N.device)
    for bucket_N in (slot_N, ratio_N):
        sums[0].index_add_(0, bucket_N, losses_N.detach().double())
        sums[1].index_add_(0, bucket_N, torch.ones_like(losses_N, dtype=torch.float64))
    return sums.flatten()


def bucket_means(sums: Sequence[float]) -> dict[str, float]:
    """The mean loss of every bucket that has a label, by its name."""
    totals, counts = sums[: len(BUCKETS)], sums[len(BUCKETS) :]
    return {name: total / count for name, total, count in zip(BUCKETS, totals, counts, strict=True) if count}
