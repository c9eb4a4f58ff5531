"""A step's last part, on the host: counts it, hands out the committed tokens, lets finished sequences go."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import ForwardExperts, Piece
from mbd_core.decoding.answers.slots import Frame, SlotState, StepTrace
from mbd_core.decoding.blocks.request import FinishReason, StepOutput
from mbd_core.decoding.blocks.sampling import log_probability
from mbd_core.engine.measures import EngineCounts, ForwardPart
from mbd_core.engine.schedule.drafting import DraftedStep, Drafting
from mbd_core.engine.schedule.forward_seconds import StepLoad
from mbd_core.engine.schedule.pacing import Pacer
from mbd_core.engine.schedule.scheduler import PrefillChunk
from mbd_core.engine.seating import Seating
from mbd_core.engine.sequences.sequence import SequenceState
from mbd_core.engine.step.planned_rows import PlannedRun
from mbd_core.engine.step.report import HostCopy, StepReport, unpack_report
from mbd_core.engine.step.steering import SharedWork
from mbd_core.engine.step_ahead import LaunchedStep, StepPlan

if TYPE_CHECKING:
    from mbd_core.decoding.canvas.plan import CanvasUpdate
    from mbd_core.trace.recorder import TraceRecorder


class Collector:
    """Turns steps into outputs.

    pacer          learns how long each step took, by `clock`; so does `drafting`, if requests may choose to draft
    share, tries   of the guides' decisions for planned rows (`PlannedRuns.update`)
    counts         counts of the steps so far
    last_report    the report of the last step that was read, on the sequences that decode in blocks
    """

    def __init__(
        self,
        seating: Seating,
        pacer: Pacer,
        drafting: Drafting | None,
        *,
        clock: Callable[[], float],
        eos_token_ids: tuple[int, ...],
        share: SharedWork,
        tries: Callable[[], float],
        trace: "TraceRecorder | None" = None,
    ) -> None:
        self._share, self._tries = share, tries
        self._seating, self._pacer, self._drafting, self._clock = seating, pacer, drafting, clock
        self._eos, self._trace = eos_token_ids, trace
        self.counts = EngineCounts()
        self.last_report = unpack_report(
            np.zeros(0), num_slots=seating.buffer.num_slots, block_size=seating.buffer.block_size
        )
        self._last_read = self._last_end = 0.0
        self._follows_unread = False
        self._drafted_step: DraftedStep | None = None  # of the step under collection, for `drafting`

    def collect(self, step: LaunchedStep) -> list[StepOutput]:
        """The tokens that a step committed. Sequences that ended or were aborted since its plan have no share."""
        decodes = [] if step.report is None else list(step.plan.decoding.values())
        for sequence, start, ids in step.experts:
            is_numbered = any(sequence is other for other in decodes)
            number = self._forward(sequence) + 1 if is_numbered else 0  # the step is counted below
            sequence.experts.append(ForwardExperts(number, start, ids))
        outputs, kind = self._collect_blocks(step.plan, step.report)
        if step.planned is not None:
            outputs += self._collect_planned(step.plan, step.planned)
            kind = "decode"
        self.counts.forwards[kind] += 1
        self._measure(step)
        return outputs

    def _measure(self, step: LaunchedStep) -> None:
        """Tells the pacer how long the step took.

        On a GPU a step of prompts alone may still be under way, because the host reads nothing of it, and the next
        step waits for it. Neither of the two is measured.
        """
        now, decodes = self._clock(), step.report is not None or step.planned is not None
        is_read = decodes or not self._seating.tables_RP.is_cuda
        if is_read and not self._follows_unread:
            seconds = now - max(step.plan.started_at, self._last_end)
            self._pacer.observe(step.plan.chunks, decodes=decodes, seconds=seconds)
            if step.planned is not None and step.report is None and not step.plan.chunks:
                self._seating.planned.observe(seconds)
            if self._drafting is not None and self._drafted_step is not None:
                self._drafting.observe(self._drafted_step, seconds)
        self._drafted_step = None
        self._last_end, self._follows_unread = now, not is_read

    def _collect_blocks(self, plan: StepPlan, report_copy: HostCopy | None) -> tuple[list[StepOutput], ForwardPart]:
        scheduler, ledger = self._seating.scheduler, self._seating.ledger
        scheduler.publish_chunks(plan.chunks)
        for sequence in {id(c.sequence): c.sequence for c in plan.chunks}.values():
            if not sequence.prompt_stored:
                sequence.counted += Counts(num_prefill_forwards=1)
            elif not sequence.stored_at:
                sequence.stored_at = sequence.prompt_until = time.perf_counter()
                if plan.decoding.get(sequence.row) is sequence:  # the forward's seconds count as decoding
                    sequence.prompt_until = max(plan.started_at, self._last_read)
        if report_copy is None:
            self._last_read = self._clock()  # a step that was launched ahead begins to count here
            return [], "prefill"
        buffer = self._seating.buffer
        shape = (plan.kind.num_rows, buffer.num_slots, buffer.block_size)
        self.last_report, tops_RNB2K = report_copy.read(shape=shape)
        report = self.last_report
        seconds = self._seconds_since(plan)
        decoding = plan.decoding
        if decoding is not ledger.sequences:
            decoding = {row: s for row, s in decoding.items() if scheduler.is_running(s)}
        if self._trace is not None and decoding:
            record_step(self._trace, plan.number, decoding, report)
        kind: ForwardPart = "decode" if ledger.count(decoding, report, seconds) else "store"
        self.counts.sequence_forwards += len(decoding)
        if plan.kind.work.revises:
            self.counts.edited_tokens += int(report.edited_RN[list(decoding)].sum())
        frames: dict[int, Frame] = {}
        for row, sequence in decoding.items():
            if sequence.step_map is not None:
                slots = slice(sequence.request.decoding.buffer_size)
                masked_NB = report.masked_RNB[row, slots] > 0
                sequence.step_map.update(report.tokens_RNB[row, slots], masked_NB, self._forward(sequence))
            if sequence.top_log is not None and tops_RNB2K is not None:
                slots = slice(sequence.request.decoding.buffer_size)
                masked_NB = report.masked_RNB[row, slots] > 0
                states_N, tokens_NB = report.states_RN[row, slots], report.tokens_RNB[row, slots]
                sequence.top_log.update(states_N, tokens_NB, masked_NB, tops_RNB2K[row, slots])
            if sequence.frame_log is not None:
                frames[row] = sequence.frame_log.frame(
                    report.states_RN[row],
                    report.tokens_RNB[row],
                    report.masked_RNB[row] > 0,
                    num_stored=int(report.num_blocks_R[row]),
                    start=sequence.committed,
                    forward=self._forward(sequence),
                )
        outputs = []
        for row in report.num_blocks_R.nonzero()[0].tolist():
            if row in decoding:
                sequence = decoding[row]
                blocks = slice(int(report.num_blocks_R[row]))
                self.counts.block_lifetimes.extend(ledger.take_ages(row, blocks.stop))
                tokens = report.tokens_RNB[row, blocks].astype(np.int64).ravel().tolist()
                step = self._commit(sequence, tokens, report.confidence_RNB[row, blocks].ravel())
                outputs.append(replace(step, frame=frames.pop(row, None)))
                if sequence.seated:
                    ledger.update(sequence)
        outputs += [replace(self._step(decoding[row], Piece()), frame=frame) for row, frame in frames.items()]
        return outputs, kind

    def _forward(self, sequence: SequenceState) -> int:
        """The number of the sequence's last forward, from 1; forwards on an earlier engine count."""
        return sequence.request.first_forward + self._seating.ledger.counts(sequence).num_forwards

    def _seconds_since(self, plan: StepPlan) -> float:
        """Wall time of a step: since its plan, or since the previous step was read."""
        now = self._clock()
        start, self._last_read = max(plan.started_at, self._last_read), now
        return now - start

    def _commit(self, sequence: SequenceState, new_tokens: list[int], confidence: np.ndarray) -> StepOutput:
        """Hands out the useful part of `new_tokens`: after the prompt, within the budget, before EOS."""
        request, start = sequence.request, sequence.committed
        num_known = len(request.prompt) + len(request.committed)
        useful = slice(max(0, num_known - start), max(0, sequence.end - start))
        self._seating.scheduler.commit(sequence, new_tokens)
        ended = start + len(new_tokens) >= sequence.end
        piece, num_blocks = Piece(tokens=tuple(new_tokens)), len(new_tokens) // sequence.block_size
        if request.logprobs or request.has_rollout:
            piece = replace(piece, logprobs=tuple(log_probability(torch.from_numpy(confidence)).tolist()))
        if sequence.top_log is not None:
            piece = replace(piece, tops=tuple(sequence.top_log.take(num_blocks)))
            if request.carries:
                sequence.top_log.carry(num_blocks)
        if sequence.step_map is not None:
            steps, edits = sequence.step_map.take(num_blocks)
            piece = replace(piece, steps=steps, edits=edits)
            if request.carries:
                sequence.step_map.carry(self._forward(sequence))
        return self._emit(sequence, piece[useful], ended=ended)

    def _emit(self, sequence: SequenceState, piece: Piece, *, ended: bool) -> StepOutput:
        """Hands out new tokens, up to a token that ends the answer. After that token, or if `ended`, the request is
        done."""
        request = sequence.request
        stops = request.ends(self._eos)
        end_index = min([piece.tokens.index(eos) for eos in stops if eos in piece.tokens], default=None)
        reason: FinishReason | None = None
        stop_reason: int | None = None
        if ended:
            reason = "stop" if request.template else "length"
        if end_index is not None:
            if request.has_rollout:
                end = len(request.prompt) + sequence.num_emitted + end_index
                sequence.tail = piece[end_index : end_index + request.rest_of_block(end)]
            end_token = piece.tokens[end_index]
            stop_reason = end_token if end_token in request.stop_token_ids else None
            piece, reason = piece[:end_index], "stop"
        sequence.answer += piece
        self.counts.committed_tokens += len(piece)
        if reason is not None:
            self._seating.finish(sequence)
            self.counts.end(sequence)
        output = sequence.output(reason, stop_reason=stop_reason) if reason is not None else None
        return replace(self._step(sequence, piece), output=output, tail=sequence.tail)

    def _step(self, sequence: SequenceState, piece: Piece) -> StepOutput:
        """The output of a step for a request."""
        return StepOutput(
            request_id=sequence.request.request_id,
            output=None,
            counts=self._seating.ledger.counts(sequence),
            piece=piece,
            weights=sequence.weights or (0, 0),
            closing=() if sequence.guide is None else tuple(sequence.guide.rest(sequence.num_emitted)),
        )

    def _collect_planned(self, plan: StepPlan, planned: Tensor | list[Any]) -> list[StepOutput]:
        """Collects the planned rows' part of a step; tokens without a gap before them are handed out."""
        outputs = []
        updates = self._seating.planned.update(planned, self._share, tries=self._tries())
        if self._drafting is not None:
            self._drafted_step = _drafted_step(updates, plan.chunks)
        self.counts.sequence_forwards += len(updates)
        seconds = self._clock() - plan.started_at
        for run, update in updates:
            sequence, decoder = run.sequence, run.decoder
            sequence.counted += Counts(
                num_forwards=1,
                num_store_forwards=_stores_only(update),
                decode_seconds=seconds,
                num_drafted_tokens=update.drafted,
                num_confirmed_tokens=update.confirmed,
                num_positions=run.num_positions,
            )
            self.counts.drafted_tokens += update.drafted
            self.counts.confirmed_tokens += update.confirmed
            if update.drafted:
                self.counts.verifications += 1
                self.counts.accepted_lengths.add(update.confirmed)
            if self._trace is not None:
                self._trace.extend(
                    _slot_traces(plan.number, sequence, update, self._seating.buffer.num_slots, self._trace.detail)
                    if update.slots
                    else _planned_traces(plan.number, run, update)
                )
            frame = _planned_frame(sequence, update) if sequence.request.frames else None
            piece = sequence.request.asked(decoder.answer_from(sequence.num_emitted))
            if not sequence.is_canvas:
                self._seating.scheduler.extend(sequence, list(piece.tokens), decoder.num_stored)
            if not decoder.done:  # an EOS counts when its block and all blocks before are complete
                ends = sequence.request.ends(self._eos)
                piece = piece[: next((i for i, token in enumerate(piece.tokens) if token in ends), None)]
            if piece or decoder.done:
                outputs.append(replace(self._emit(sequence, piece, ended=decoder.done), frame=frame))
            elif frame is not None:
                outputs.append(replace(self._step(sequence, piece), frame=frame))
        return outputs


def record_step(
    trace: "TraceRecorder", number: int, decoding: Mapping[int, SequenceState], report: StepReport
) -> None:
    """Records a step in `trace`; `decoding` are the sequences that took part, by batch row."""
    rows = list(decoding)
    masked = report.masked_RNB[rows] > 0
    block_size = report.tokens_RNB.shape[-1]
    trace.add(
        number,
        [s.request.request_id for s in decoding.values()],
        [(s.committed - s.origin) // block_size for s in decoding.values()],
        report.states_RN[rows],
        report.mask_ratio_RN[rows],
        report.accepted_RN[rows],
        report.edited_RN[rows],
        np.where(masked, -1, report.tokens_RNB[rows]) if trace.detail else None,
        np.where(masked, 0.0, report.confidence_RNB[rows]) if trace.detail else None,
    )


def _drafted_step(updates: "Sequence[tuple[PlannedRun, CanvasUpdate]]", chunks: Sequence[PrefillChunk]) -> DraftedStep:
    positions = single = 0
    given = list[int]()
    for run, update in updates:
        positions += run.num_positions
        if run.may_draft and run.num_positions == 1:
            single += 1
        elif run.may_draft:
            given.append(sum(update.accepted.values()))
    return DraftedStep(
        load=StepLoad(len(updates), positions, sum(c.stop - c.start for c in chunks)),
        single=single,
        drafts=len(given),
        verified=sum(tokens > 0 for tokens in given),
        tokens=sum(given),
    )


def _planned_traces(number: int, run: PlannedRun, update: "CanvasUpdate") -> list[StepTrace]:
    return [
        StepTrace(
            request_id=run.sequence.request.request_id,
            step=number,
            slot=lane,
            block=block,
            state="CANVAS",
            mask_ratio=update.mask_ratio[lane, block],
            accepted=num_accepted,
            edited=update.edited.get((lane, block), 0),
        )
        for (lane, block), num_accepted in update.accepted.items()
    ]


def _stores_only(update: "CanvasUpdate") -> bool:
    """Whether a planned decoder's forward decoded none of its blocks."""
    return bool(update.slots) and all(slot.seen is SlotState.TO_CACHE for slot in update.slots)


def _slot_traces(
    number: int, sequence: SequenceState, update: "CanvasUpdate", num_slots: int, detail: bool
) -> list[StepTrace]:
    """The rows of a planned decoder's blocks, and of its empty slots."""
    size = sequence.request.decoding.block_size
    first = (update.slots[0].start - sequence.origin) // size
    rows = []
    for n in range(num_slots):
        slot = update.slots[n] if n < len(update.slots) else None
        tokens, confidences, draft = (-1,) * size, (0.0,) * size, (-1,) * size
        verdict = None if slot is None else slot.frame.verdict
        if slot is not None:
            tokens, confidences = _with_masks(slot.frame.tokens), slot.confidences
        if verdict is not None:
            draft = _with_masks(verdict.drafted)
        rows.append(
            StepTrace(
                request_id=sequence.request.request_id,
                step=number,
                slot=n,
                block=first + n,
                state=(SlotState.DUMMY if slot is None else slot.seen).name,
                mask_ratio=0.0 if slot is None else slot.mask_ratio,
                accepted=0 if slot is None else len(slot.frame.accepted),
                edited=0 if slot is None else len(slot.frame.edited),
                judged=0 if verdict is None else verdict.judged,
                confirmed=0 if verdict is None else len(verdict.confirmed),
                tokens=tokens if detail else None,
                confidences=confidences if detail else None,
                draft=draft if detail else None,
            )
        )
    return rows


def _with_masks(tokens: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(-1 if token is None else token for token in tokens)


def _planned_frame(sequence: SequenceState, update: "CanvasUpdate") -> Frame:
    """The frame of a planned decoder's blocks, without positions past the request's budget."""
    request = sequence.request
    prompt, end = len(request.prompt), len(request.prompt) + request.max_tokens
    return Frame(
        forward=request.first_forward + sequence.counted.num_forwards,
        position=update.slots[0].start - prompt,
        num_slots=request.decoding.buffer_size,
        slots=tuple(replace(s.frame, tokens=s.frame.tokens[: end - s.start]) for s in update.slots),
    )
