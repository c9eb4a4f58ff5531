"""Decoding steps without a model: a runner whose hidden states follow from tokens and positions alone."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from mbd_core.engine.step.batch import Batch

VOCAB, MASK = 40, 39


class StubRunner:
    """Stands for `ModelRunner`. Hidden states of tokens that nothing is read of are NaN."""

    last_batch: Batch | None = None

    def __init__(self, *, shift: bool, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._table = torch.randn(500, 16, generator=generator)
        self._head = torch.randn(16, VOCAB, generator=generator) * 0.7
        self.model = SimpleNamespace(config=SimpleNamespace(shift_logits=shift))
        self.last_RD = torch.zeros(num_rows, 16)
        self.batch: Batch | None = None
        self.step = 0

    def forward(self, batch: Batch) -> Tensor:
        # as it is now: some of its tensors are views of the buffer, which the step changes
        self.batch = replace(batch, **{name: t.clone() for name, t in vars(batch).items() if isinstance(t, Tensor)})
        self.step += 1
        hidden = self._table[(batch.positions_T * 7 + batch.input_ids_T * 3 + self.step) % 500]
        if batch.live_T is not None:
            hidden[~batch.live_T] = torch.nan
        if self.model.config.shift_logits:
            hidden = torch.cat((hidden, self.last_RD))
        return hidden if batch.logits_at_A is None else hidden[batch.logits_at_A]

    def blockwise_logits(self, hidden_AD: Tensor, batch: Batch, *, block_size: int, whole: bool):
        return lambda part: hidden_AD[part] @ self._head

    def remember_prompts(self, ends: object) -> None: ...

    def remember_committed(self, slot_end_RN: Tensor | None, num_blocks_R: Tensor) -> None:
        if self.model.config.shift_logits:
            assert slot_end_RN is not None and slot_end_RN.dtype == num_blocks_R.dtype == torch.int64
            self.last_RD = self.last_RD + num_blocks_R[:, None] + slot_end_RN[:, -1:]
