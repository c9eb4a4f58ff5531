"""The one decode step: activate, lay out rows, forward, predict, commit, report.

Here rows are packed: prompt chunks, resident slots and planned rows in one forward (Alg. 4). `static_step.py` sends
every slot of the batch rows in use, resident or not (Alg. 5), and `graphs.py` captures that as a CUDA graph.

Shape legend: R batch rows, A positions with logits, D hidden, V vocabulary, P pages of a row, X numbers of a report.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.decoding.answers.piece import MAX_TOPS
from mbd_core.decoding.blocks.acceptance import Prediction, predict
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.work import StepWork
from mbd_core.engine.step.batch import Batch, pack
from mbd_core.engine.step.kinds import StepKind
from mbd_core.engine.step.report import pack_report, view_of, with_tops
from mbd_core.engine.step.rows import StepRows
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.engine.step.steering import Steering


def decode_step(
    state: "StepState",
    kind: StepKind,
    lay_out: Callable[[BlockBuffer], StepRows],
    steering: Steering | None = None,
) -> tuple[Tensor, Tensor | list[Any] | None]:
    """One forward of the first `kind.num_rows` batch rows, then predict and commit: the report (X,), and the planned
    rows' result (`StepState.planned`).

    With `steering` the host decides tokens of some rows.
    """
    runner, work = state.runner, kind.work
    buffer = state.buffer.head(kind.num_rows)
    buffer.activate()
    if steering is not None:
        steering.fill(buffer)
    view = view_of(buffer)
    rows = lay_out(buffer)
    batch, hidden_AD = state.forward(rows)
    logits_of = state.logits_of(hidden_AD, batch, work, has_steering=steering is not None)
    if steering is not None:
        assert rows.at_A is not None
        logits_of = steering.watch(logits_of, rows.at_A, buffer)
    prediction = state.predict(rows, buffer, logits_of, work)
    chosen = None if steering is None else steering.choose(prediction, buffer, state.vocab)
    commit = buffer.commit(prediction, work, chosen=chosen)
    runner.remember_prompts(rows.prompt_ends)
    runner.remember_committed(rows.slot_end_RN, commit.num_blocks_R)
    report_X = pack_report(view, commit, buffer)
    return with_tops(report_X, prediction.tops_A2K, rows.at_A, buffer), state.planned(rows, batch, hidden_AD)


RunForward = Callable[[ModelRunner, Batch], Tensor]
"""Runs a forward of a runner's model; returns the hidden states (A, D) of the asked positions."""


def run_eagerly(runner: ModelRunner, batch: Batch) -> Tensor:
    """A forward kernel by kernel."""
    return runner.forward(batch)


def store_step(state: "StepState", rows: StepRows, *, run: RunForward = run_eagerly) -> Tensor | list[Any] | None:
    """A forward in which no block is decoded: prompt chunks are stored, and planned rows are read
    (`StepState.planned`)."""
    if not rows.groups:  # the draft model alone has rows
        return state.with_drafts(rows, None, run)
    batch, hidden_AD = state.forward(rows, run)
    state.runner.remember_prompts(rows.prompt_ends)
    return state.planned(rows, batch, hidden_AD, run)


@dataclass(frozen=True, kw_only=True)
class StepState:
    """The state that steps read and write; none of its tensors is ever reallocated.

    tables_RP     the page table of every batch row
    vocab         for decisions of one rank alone; `shared_vocab` is for decisions of all ranks together
    adapters_R    the slot of each batch row's LoRA adapter, 0 for none; `None` in an engine that loads no adapters
    logits_chunk  positions whose logits are held at once
    draft_runner  the draft model, if the engine has one; its keys lie in the same pages of a cache of its own
    """

    runner: ModelRunner
    buffer: BlockBuffer
    tables_RP: Tensor
    vocab: Vocab
    shared_vocab: Vocab
    page_size: int
    batch_invariant: bool
    logits_chunk: int
    adapters_R: Tensor | None = None
    draft_runner: ModelRunner | None = None

    def forward(self, rows: StepRows, run: RunForward = run_eagerly) -> tuple[Batch, Tensor]:
        """The packed rows and the hidden states (A, D) of their asked positions."""
        batch = pack(rows.groups, page_size=self.page_size, batch_invariant=self.batch_invariant)
        return batch, run(self.runner, batch)

    def logits_of(
        self, hidden_AD: Tensor, batch: Batch, work: StepWork, *, has_steering: bool = False
    ) -> Callable[[slice], Tensor]:
        """The logits of a range of `hidden_AD`; each rank's own part if the step takes likeliest tokens alone."""
        whole = has_steering or work.draws or work.scores or work.adjusts or work.tops
        return self.runner.blockwise_logits(hidden_AD, batch, block_size=self.buffer.block_size, whole=whole)

    def predict(
        self, rows: StepRows, buffer: BlockBuffer, logits_of: Callable[[slice], Tensor], work: StepWork
    ) -> Prediction:
        """The predicted token of each position of `rows` with logits, in its place of the buffer."""
        return predict(
            logits_of,
            rows.num_asked,
            rows.at_A,
            self.shared_vocab,
            shape=buffer.masked_RNB.shape,
            chunk=self.logits_chunk,
            draw=buffer.draw(rows.at_A, truncates=work.truncates) if work.draws else None,
            adjust=buffer.adjust(rows.at_A) if work.adjusts else None,
            fallback_P=buffer.fallback_at(rows.at_A) if work.scores else None,
            num_tops=self.num_tops if work.tops else 0,
        )

    @property
    def num_tops(self) -> int:
        """The number of likeliest tokens that a step reports for a position, if it reports any."""
        return min(MAX_TOPS, self.vocab.size)

    def planned(
        self, rows: StepRows, batch: Batch, hidden_AD: Tensor, run: RunForward = run_eagerly
    ) -> Tensor | list[Any] | None:
        """The logits (A, V) of the planned rows, which stand last, or their decoders' own readings; `None` without
        planned rows."""
        if rows.planned_asked is None:
            return self.with_drafts(rows, None, run)
        own_AD = hidden_AD[rows.num_asked :]
        if rows.read_planned is not None:
            return rows.read_planned(own_AD, self.runner, apart=batch.split is not None)
        own_AV = self.runner.logits(own_AD, split=None if batch.split is None else rows.planned_asked)
        return self.with_drafts(rows, own_AV, run)

    def with_drafts(self, rows: StepRows, own_AV: Tensor | None, run: RunForward) -> Tensor | None:
        """The logits of all planned rows, in their order: the large model's (`own_AV`) and the draft model's.

        The draft model runs here, if it has rows. Its logits are cut or padded to the large model's vocabulary, and
        its mask is never the likeliest token.
        """
        if rows.drafts is None:
            return own_AV
        runner, drafts = self.draft_runner, rows.drafts
        assert runner is not None, "admission refuses drafts without a draft model"
        batch = pack(drafts.groups, page_size=self.page_size, batch_invariant=self.batch_invariant)
        hidden_AD = run(runner, batch)
        if not drafts.asked:  # prompts alone
            return own_AV
        draft_AV = runner.logits(hidden_AD, split=None if batch.split is None else drafts.asked)
        draft_AV[:, runner.model.config.mask_token_id] = -torch.inf
        width = self.runner.model.config.vocab_size
        draft_AV = F.pad(draft_AV[:, :width], (0, max(0, width - draft_AV.shape[1])), value=-torch.inf)
        if own_AV is None:
            return draft_AV
        of_drafts, own = (
            logits_AV.split([n for n, by in drafts.by_model if by is of])
            for of, logits_AV in ((True, draft_AV), (False, own_AV))
        )
        parts = {True: iter(of_drafts), False: iter(own)}
        return torch.cat([next(parts[by_draft_model]) for _, by_draft_model in drafts.by_model])
