"""The texts that an autoregressive teacher reads for a training batch: each clean text once, causally.

A text is a sequence of its own, one causal stream (`states/causal_stream.py`). A label's target is the teacher's
distribution of the next token at the token before the label. All noisy streams of an answer share one text. The
labels of an AR loss have no target.

Shape legend: S training sequences, L tokens of the longest, N labels.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.batch import AR_SLOT, MultiTFBatch, collate
from mbd_core.multitf.states.causal_stream import causal_columns


@dataclass(frozen=True)
class Lesson:
    """The sequences that a teacher reads for a batch, and where it gives the target of each label (N).

    The target of label n is the teacher's distribution at `reading.source[rows[n], places[n]]` in sequence `rows[n]`.
    A label without a target (`has_target`) has place 0 of sequence 0.
    """

    reading: MultiTFBatch
    rows: Tensor
    places: Tensor
    has_target: Tensor

    @classmethod
    def of(cls, batch: MultiTFBatch, eos_token_ids: Collection[int]) -> Self:
        """The texts of a batch on the CPU: the clean tokens before each noisy stream, then the stream with its labels
        in place of its masks.

        A text's first token has no target, because nothing predicts it. Tokens after an answer's first EOS have none
        either: the teacher was never trained on text after an EOS.
        """
        numbers: dict[tuple[int, ...], int] = {}
        text_of, place_of = (torch.full(batch.labels.shape, -1) for _ in range(2))
        is_masked = (batch.labels != IGNORE) & (batch.slot != AR_SLOT)
        clean = torch.where(is_masked, batch.labels, batch.input_ids)
        for row, stream in enumerate(batch.stream):
            of_noise = (stream > 0) & (batch.slot[row] != AR_SLOT)
            for key in torch.stack([batch.sample[row][of_noise], stream[of_noise]]).unique(dim=1).T:
                own = (batch.sample[row] == key[0]) & (stream == key[1])
                positions, ids = batch.positions[row][own], clean[row][own]
                start = int(positions[0])
                before = (batch.sample[row] == key[0]) & (stream == 0) & (batch.positions[row] < start)
                text = (*clean[row][before].tolist(), *ids.tolist())
                assert len(text) == start + len(ids), "a noisy stream without the clean tokens before it"
                text_of[row, own] = numbers.setdefault(text, len(numbers))
                is_read = (positions > 0) & (positions <= end_of(text, eos_token_ids))
                place_of[row, own] = torch.where(is_read, positions - 1, -1)
        is_label = batch.labels != IGNORE
        return cls.at(list(numbers), text_of[is_label], place_of[is_label])

    @classmethod
    def at(cls, texts: Sequence[Sequence[int]], rows_N: Tensor, places_N: Tensor) -> Self:
        """Texts, and for each label the place of the token before it in its text; -1 for a label without a target."""
        batch = collate([causal_columns(text) for text in texts])
        return cls(batch, rows_N.clamp(min=0), places_N.clamp(min=0), places_N >= 0)

    def to(self, device: torch.device) -> Self:
        moved = {name: value.to(device) for name, value in vars(self).items()}
        return replace(self, **moved)


def end_of(text: Sequence[int], eos_token_ids: Collection[int]) -> int:
    """The place of the first of the equal EOS tokens at a text's end. Its length if it does not end with EOS."""
    end = len(text)
    while end > 0 and text[end - 1] == text[-1] and text[-1] in eos_token_ids:
        end -= 1
    return end
