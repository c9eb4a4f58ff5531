"""A run's loss by bucket: means over the labels of each slot of a noise-group, and of each part of the mask ratios.

A label's slot is the place of its block within its noise-group, from 1. Its mask ratio is the ratio drawn for its
block. Labels of the AR loss have buckets of their own, for loss and accuracy. Sums and counts travel as one row of
numbers, so workers add theirs in one exchange.

Shape legend: N labels, K buckets.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mbd_core.multitf.states.batch import AR_SLOT

NUM_SLOTS = 8
"""The last slot holds all later slots too: a layout of one group has a slot for each of a response's blocks."""
NUM_RATIOS = 4
BUCKETS = (
    *(f"loss_slot_{slot}" for slot in range(1, NUM_SLOTS + 1)),
    *(f"loss_ratio_{100 * part // NUM_RATIOS}_{100 * (part + 1) // NUM_RATIOS}" for part in range(NUM_RATIOS)),
    "loss_ar",
    "accuracy_ar",
)
"""The names of all buckets in logs; `loss_ratio_25_50` holds ratios above 0.25 and up to 0.5."""


def bucket_sums(losses_N: Tensor, hits_N: Tensor, slots_N: Tensor, ratios_N: Tensor) -> Tensor:
    """The sums of the losses in all buckets, then the numbers of labels: (2K) in float64. Slots count from 0.

    `hits_N`: whether the model's likeliest token is the label.
    """
    is_ar_N, losses_N = slots_N == AR_SLOT, losses_N.detach().double()
    slot_N = slots_N.clamp(0, NUM_SLOTS - 1)
    ratio_N = NUM_SLOTS + ((ratios_N * NUM_RATIOS).ceil().long() - 1).clamp(0, NUM_RATIOS - 1)
    ar, accuracy_ar = BUCKETS.index("loss_ar"), BUCKETS.index("accuracy_ar")
    sums = torch.zeros(2, len(BUCKETS), dtype=torch.float64, device=losses_N.device)
    for bucket_N, values_N in (
        (slot_N.masked_fill(is_ar_N, ar), losses_N),
        (ratio_N.masked_fill(is_ar_N, accuracy_ar), torch.where(is_ar_N, hits_N.detach().double(), losses_N)),
    ):
        sums[0].index_add_(0, bucket_N, values_N)
        sums[1].index_add_(0, bucket_N, torch.ones_like(values_N))
    return sums.flatten()


def bucket_means(sums: Sequence[float]) -> dict[str, float]:
    """The mean of every bucket that has a label, by its name."""
    totals, counts = sums[: len(BUCKETS)], sums[len(BUCKETS) :]
    return {name: total / count for name, total, count in zip(BUCKETS, totals, counts, strict=True) if count}
