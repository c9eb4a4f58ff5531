"""Training sequences as one padded batch of columns.

Shape legend: S training sequences, L tokens of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.packing import Together, alone

AR_SLOT = -1
"""The slot of the causal stream's tokens, which are of no noise-group."""

SequenceColumns = dict[str, Any]
"""One sample's training sequence as lists or arrays, named as the fields of `MultiTFBatch` except `sample`."""


@dataclass(frozen=True)
class MultiTFBatch:
    """Padded training sequences, all (S, L).

    `input_ids`, `positions` and the mask's three numbers (`stream`, `block`, `first`) go into the model. `source` is
    the place of a label's logits in its sequence: the label's own place, or with shifted logits the place of the token
    before it. `rollout` marks masks that the model's own predictions replace first. `weights`, in float64, sum to 1
    per sample under `masked_mean`. Losses are reported (`bucket_sums`) by `slot`, a noisy token's block counted from
    its noise-group's first, and by `ratio`, the mask ratio drawn for that block; a causal stream's tokens have the
    slot `AR_SLOT`. `sample` is the number of a token's sample in the batch, -1 for padding.
    """

    padding: ClassVar[dict[str, Any]] = {
        "stream": -1,
        "sample": -1,
        "labels": IGNORE,
        "weights": 0.0,
        "rollout": False,
        "ratio": 0.0,
    }
    """The values that fill a column after its sequence, if they are not 0. A column of floats is in float64."""

    input_ids: Tensor
    positions: Tensor
    stream: Tensor
    block: Tensor
    first: Tensor
    labels: Tensor
    weights: Tensor
    source: Tensor
    rollout: Tensor
    slot: Tensor
    ratio: Tensor
    sample: Tensor

    @property
    def num_samples(self) -> int:
        return int((self.sample.unique() >= 0).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int((self.stream >= 0).sum())

    def to(self, device: torch.device) -> Self:
        return type(self)(*(t.to(device) for t in vars(self).values()))


AnyBatch = TypeVar("AnyBatch", bound=MultiTFBatch)


def collate(samples: Sequence[SequenceColumns], together: Together | None = None) -> MultiTFBatch:
    """Training sequences padded to the longest; `together`: the samples of each, by default one."""
    return collate_as(MultiTFBatch, samples, together)


def collate_as(kind: type[AnyBatch], samples: Sequence[SequenceColumns], together: Together | None = None) -> AnyBatch:
    """`collate`, for a kind of batch that may have further columns."""
    numbers = together or alone(len(samples))
    lengths = [len(sample["input_ids"]) for sample in samples]
    fill = {f.name: 0 for f in fields(kind)} | kind.padding
    shape = len(numbers), max(sum(lengths[number] for number in row) for row in numbers)
    columns = {name: np.full(shape, pad) for name, pad in fill.items()}
    for row, in_row in enumerate(numbers):
        start = 0
        for number in in_row:
            own = row, slice(start, start + lengths[number])
            for name in columns.keys() - {"sample"}:
                np.copyto(columns[name][own], samples[number][name], casting="same_kind")
            columns["source"][own] += start
            columns["sample"][own] = number
            start += lengths[number]
    return kind(**{name: torch.from_numpy(column) for name, column in columns.items()})


def samples_of(batch: MultiTFBatch) -> list[list[tuple[int, int]]]:
    """The samples of each training sequence in their order: each one's number in the batch, and its tokens."""
    rows = []
    for sample in batch.sample:
        numbers, counts = sample[sample >= 0].unique_consecutive(return_counts=True)
        rows.append(list(zip(numbers.tolist(), counts.tolist(), strict=True)))
    return rows


def empty_sequence() -> SequenceColumns:
    """The columns of a training sequence without tokens."""
    return {field.name: [] for field in fields(MultiTFBatch) if field.name != "sample"}


def check_columns(row: SequenceColumns) -> None:
    lengths = {name: len(column) for name, column in row.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"a training sequence has columns of unequal lengths: {lengths}; its sample is malformed")
