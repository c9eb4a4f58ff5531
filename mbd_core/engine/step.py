"""The one decode step: activate, lay out rows, forward, predict, commit, report; and which kind of it a batch needs.

It is called in three ways. Packed: prompt chunks, resident slots and planned rows in one forward (Alg. 4). Static:
every slot of the batch rows in use, resident or not (Alg. 5). Captured: the static call as a CUDA graph (`graphs.py`).
They differ in the rows that are laid out and in who calls; what a step does stands here once.

Shape legend: R batch rows, N slots, B block size, A positions with logits, D hidden, V vocabulary, P pages of a row,
X numbers of a report.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from mbd_core.decoding.blocks.acceptance import predict
from mbd_core.decoding.blocks.arrays import tensor_of
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import MAX_TOPS, Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.report import Report, pack_report, report_of, view_of, with_tops
from mbd_core.engine.rows import StepRows
from mbd_core.engine.runner import Batch, ModelRunner, pack
from mbd_core.engine.steering import Steering

# Which step a batch needs: how many batch rows, how many logits, and which work. A CUDA graph serves one kind.
#
# Static steps come in few kinds, so that few graphs are captured: a power of two of batch rows, all slots of these
# rows or (with a block budget) a power of two of them, and logits for a quarter, a half, three quarters or all of
# their positions.


@dataclass(frozen=True)
class Work:
    """Which optional parts of a step some batch row needs; a step that does more than a row needs does not change it.

    draws      tokens are drawn (temperature above 0)
    truncates  they are drawn from a part of the vocabulary (top_k or top_p), which takes a sort
    scores     positions are ranked by something else than confidence
    softens    filled positions are embedded as a mixture (DMax)
    revises    filled positions may change (T2T, DMax)
    quotas     several positions may be accepted by their rank
    by_parts   blocks are filled part by part, or begin with a carried token
    adapts     a LoRA adapter changes the forward
    adjusts    logits are changed before a token is chosen (penalties, biases, bans, min_p)
    tops       the likeliest tokens of each position are reported
    """

    draws: bool = False
    truncates: bool = False
    scores: bool = False
    softens: bool = False
    revises: bool = False
    quotas: bool = False
    by_parts: bool = False
    adapts: bool = False
    adjusts: bool = False
    tops: bool = False

    def covers(self, other: "Work") -> bool:
        """Whether every part that `other` has is done here too."""
        return all(getattr(self, f.name) >= getattr(other, f.name) for f in fields(Work))


WORK_NAMES = tuple(f.name for f in fields(Work))
ALL_WORK = Work(**dict.fromkeys(WORK_NAMES, True))


def work_of(decoding: DecodingConfig, sampling: Sampling, *, adapts: bool = False) -> Work:
    """What a request asks of each of its steps."""
    return Work(
        draws=sampling.draws,
        truncates=sampling.truncates,
        scores=decoding.ranks_by_score,
        softens=decoding.soft is not None,
        revises=decoding.revises,
        quotas=decoding.accepts_several,
        by_parts=decoding.by_parts,
        adapts=adapts,
    )


def work_of_request(request: Request) -> Work:
    work = work_of(request.decoding, request.sampling, adapts=request.adapter is not None)
    return replace(work, adjusts=request.adjusts, tops=request.top_logprobs > 0)


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """What a step depends on beside the values in its buffers.

    num_slots  slots of each row that are sent through the model: the first ones, all others being empty
    num_asked  positions with logits, `None`: all of these slots
    """

    num_rows: int
    num_slots: int
    num_asked: int | None
    work: Work

    def covers(self, other: "StepKind") -> bool:
        """Whether a step of this kind can stand in for one of `other`."""
        has_logits = self.num_asked is None or (other.num_asked is not None and self.num_asked >= other.num_asked)
        has_slots = self.num_rows == other.num_rows and self.num_slots >= other.num_slots
        return has_slots and has_logits and self.work.covers(other.work)


@dataclass(frozen=True, kw_only=True)
class StepKinds:
    """The kinds of steps of one engine's Block Buffer.

    adapters     it can load LoRA adapters
    blocks_each  with a block budget: the blocks that each of so many running sequences may grow to
    """

    max_rows: int
    num_slots: int
    block_size: int
    batch_invariant: bool
    adapters: bool = False
    blocks_each: Callable[[int], int] | None = None

    def kind(self, *, num_rows: int, num_slots: int, num_asked: int, work: Work) -> StepKind:
        """The least kind for a batch that uses `num_rows` rows, at most the first `num_slots` slots of each, and asks
        for at most `num_asked` positions."""
        rows = _power_of_two(num_rows, self.max_rows)
        slots = self.num_slots if self.blocks_each is None else _power_of_two(num_slots, self.num_slots)
        quarter = self._quarter(rows, slots)
        quarters = max(1, -(-num_asked // quarter))
        is_whole = quarters > 3 or self.batch_invariant
        return StepKind(num_rows=rows, num_slots=slots, num_asked=None if is_whole else quarters * quarter, work=work)

    def whole(self, *, num_rows: int, work: Work) -> StepKind:
        """The least kind for a batch that uses `num_rows` rows, with all their slots and logits."""
        rows = _power_of_two(num_rows, self.max_rows)
        return StepKind(num_rows=rows, num_slots=self.num_slots, num_asked=None, work=work)

    def to_capture(self, decoding: DecodingConfig) -> list[StepKind]:
        """The kinds worth a graph: greedy requests with `decoding` in every size, without and with adapters; in the
        largest all work but what changes logits and reports more of them, and all work, which serves any other request
        too. With a block budget, all of them also in the slots that it leaves a request."""
        works = [work_of(decoding, Sampling())]
        if self.adapters:
            works.append(replace(works[0], adapts=True))
        kinds: list[StepKind] = []
        for rows, slots in self._shapes(decoding):
            max_asked = rows * min(slots, decoding.buffer_size) * self.block_size
            sizes = (*range(1, max_asked + 1, self._quarter(rows, slots)), max_asked)
            kinds += dict.fromkeys(
                self.kind(num_rows=rows, num_slots=slots, num_asked=n, work=w) for w in works for n in sizes
            )
            for work in (replace(ALL_WORK, adjusts=False, tops=False), ALL_WORK):
                kinds.append(StepKind(num_rows=rows, num_slots=slots, num_asked=None, work=work))
        return kinds

    def _shapes(self, decoding: DecodingConfig) -> list[tuple[int, int]]:
        """Rows and slots of these kinds, fewest first: all slots, and those that a request has at so many rows."""
        shapes = set()
        for n in range(1, self.max_rows + 1):
            rows = _power_of_two(n, self.max_rows)
            shapes.add((rows, self.num_slots))
            if self.blocks_each is not None and decoding.adaptive:
                slots = min(self.blocks_each(n), decoding.buffer_size)
                shapes.add((rows, _power_of_two(slots, self.num_slots)))
        return sorted(shapes)

    def _quarter(self, num_rows: int, num_slots: int) -> int:
        return -(-num_rows * num_slots * self.block_size // 4)


def _power_of_two(number: int, limit: int) -> int:
    """The least power of two that is not below `number`, at most `limit`."""
    return min(1 << (max(number, 1) - 1).bit_length(), limit)


# The step itself, on the device.


@dataclass(frozen=True, kw_only=True)
class StepState:
    """What steps read and write; none of its tensors is ever reallocated.

    tables_RP     the page table of every batch row
    vocab         for decisions of one rank alone; `shared_vocab` for those of all ranks together
    adapters_R    the slot of its LoRA adapter, 0 for none; `None` in an engine that loads no adapters
    logits_chunk  positions whose logits are held at once
    kernels       static steps do the buffer's work by Triton kernels (`graphs.py`)
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
    kernels: bool = False

    def forward(self, rows: StepRows) -> tuple[Batch, Tensor]:
        """The packed rows and the hidden states (A, D) of the positions that they ask for."""
        last, invariant = self.runner.last_batch, self.batch_invariant
        batch = pack(rows.groups, page_size=self.page_size, batch_invariant=invariant, last=last)
        return batch, self.runner.forward(batch)

    def logits_of(
        self, hidden_AD: Tensor, batch: Batch, work: Work, *, has_steering: bool = False
    ) -> Callable[[slice], Tensor]:
        """The logits of a range of `hidden_AD`; of a step that takes likeliest tokens alone, each rank's own part."""
        whole = has_steering or work.draws or work.scores or work.adjusts or work.tops
        return self.runner.blockwise_logits(hidden_AD, batch, block_size=self.buffer.block_size, whole=whole)

    @property
    def num_tops(self) -> int:
        """The likeliest tokens of a position that a step reports, where it does."""
        return min(MAX_TOPS, self.vocab.size)

    def planned(self, rows: StepRows, batch: Batch, hidden_AD: Tensor) -> Tensor | list[Any] | None:
        """The logits (A, V) of the planned rows, which stand last, or what their decoders read of them; `None` without
        any."""
        if rows.planned_asked is None:
            return None
        own_AD = hidden_AD[rows.num_asked :]
        if rows.read_planned is not None:
            return rows.read_planned(own_AD, self.runner, apart=batch.split is not None)
        return self.runner.logits(own_AD, split=None if batch.split is None else rows.planned_asked)


def decode_step(
    state: StepState,
    kind: StepKind,
    lay_out: Callable[[BlockBuffer], StepRows],
    steering: Steering | None = None,
) -> tuple[Tensor | Report, Tensor | list[Any] | None]:
    """One forward of the first `kind.num_rows` batch rows and what follows from it: the report, on a GPU packed (X,),
    and what the planned rows gave (`StepState.planned`).

    With static rows it reads nothing on the host, so that a CUDA graph can hold it. With `steering` the host decides
    tokens of some rows, which must be packed.
    """
    runner, work = state.runner, kind.work
    buffer = state.buffer.head(kind.num_rows)
    host = buffer.host
    host.activate()
    if steering is not None:
        steering.fill(buffer)
    view = view_of(host)
    rows = lay_out(buffer)
    batch, hidden_AD = state.forward(rows)
    logits_of = state.logits_of(hidden_AD, batch, work, has_steering=steering is not None)
    if steering is not None:
        assert rows.at_A is not None
        logits_of = steering.watch(logits_of, rows.at_A, buffer)
    prediction = predict(
        logits_of,
        rows.num_asked,
        rows.at_A,
        state.shared_vocab,
        shape=buffer.masked_RNB.shape,
        chunk=state.logits_chunk,
        draw=buffer.draw(rows.at_A, truncates=work.truncates) if work.draws else None,
        adjust=buffer.adjust(rows.at_A) if work.adjusts else None,
        fallback_P=buffer.fallback_at(rows.at_A) if work.scores else None,
        num_tops=state.num_tops if work.tops else 0,
    )
    parts: dict[str, Any] = {"revises": work.revises, "quotas": work.quotas, "by_parts": work.by_parts}
    if steering is None:
        commit = host.commit(prediction.host, **parts, progress_RN=view.progress_RN)
    else:
        commit = buffer.commit(prediction, **parts, chosen=steering.choose(prediction, buffer, state.vocab))
    runner.remember_prompts(rows.prompt_ends)
    runner.remember_committed(rows.slot_end_RN, tensor_of(commit.num_blocks_R))
    report, planned = report_of(view, commit, host), state.planned(rows, batch, hidden_AD)
    if prediction.tops_A2K is None and not isinstance(commit.num_blocks_R, Tensor):
        return report, planned
    return with_tops(pack_report(report), prediction.tops_A2K, rows.at_A, buffer), planned


def store_step(state: StepState, rows: StepRows) -> Tensor | list[Any] | None:
    """A forward in which no block is decoded: prompt chunks are stored, and planned rows are read
    (`StepState.planned`)."""
    batch, hidden_AD = state.forward(rows)
    state.runner.remember_prompts(rows.prompt_ends)
    return state.planned(rows, batch, hidden_AD)
