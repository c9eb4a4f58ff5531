"""Which rows a forward has: prompt chunks, slots of the Block Buffer, rows that decoders plan on the host.

Shape legend: R rows (sequences), N slots, B block size, K rows of a forward, P pages a row, A positions asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.decoding.blocks.arrays import arange, array_of, none_on_cpu, ones_like, placed, places, tensor_of, where
from mbd_core.decoding.blocks.block_buffer import BlockBuffer
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.canvas.plan import CanvasPlan, CanvasUpdate, PlannedDecoder, ReadingDecoder
from mbd_core.decoding.canvas.unmasking import guess
from mbd_core.decoding.causal.planned import planned_decoder
from mbd_core.engine.drafting import Choices, Load
from mbd_core.engine.pages import PagedKVCache
from mbd_core.engine.runner import ModelRunner, Rows, to_device
from mbd_core.engine.scheduler import PrefillChunk
from mbd_core.engine.sequence import SequenceState
from mbd_core.models.gemma import Denoising
from mbd_core.models.model_config import ModelConfig
from mbd_core.options import MOST

# The requests of an engine whose decoders plan their rows on the host, on a canvas or behind a stored prefix: their
# decoders, their pages, their rows of a forward.
#
# Shape legend: K rows, T packed tokens, P pages a row, A positions asked for, V vocabulary.


@dataclass
class PlannedRun:
    """One running request, its decoder and the plan of its next forward; the pages of each lane are (lanes, P).

    may_draft      it gives the same tokens by drafts and without, and the engine chooses
    num_positions  of the plan
    """

    sequence: SequenceState
    decoder: PlannedDecoder
    device: torch.device
    plan: CanvasPlan = field(default_factory=lambda: CanvasPlan([], []))
    reader: ReadingDecoder | None = field(init=False)  # the decoder, if it reads its logits itself
    may_draft: bool = field(init=False)
    num_positions: int = 0
    _lanes_LP: Tensor = field(default_factory=lambda: torch.zeros((0, 0), dtype=torch.int64))

    def __post_init__(self) -> None:
        self.reader = self.decoder if isinstance(self.decoder, ReadingDecoder) else None
        self.may_draft = self.decoder.draft_length > 1 and self.sequence.request.decoding.adaptive

    @property
    def lanes_LP(self) -> Tensor:
        if self._lanes_LP.numel() != len(self.sequence.pages):
            self._lanes_LP = to_device(self.sequence.pages, self.device).view(self.decoder.num_lanes, -1)
        return self._lanes_LP


class PlannedRuns:
    """All requests with planned rows that hold a batch row."""

    def __init__(self, config: ModelConfig, cache: PagedKVCache, vocab: Vocab) -> None:
        self._config, self._cache = config, cache
        self._vocab = vocab
        self._runs: dict[int, PlannedRun] = {}

    def join(self, sequence: SequenceState) -> None:
        """Begin a sequence in its row. After a preemption a canvas begins anew, because its keys are gone; behind a
        prefix, which is stored again, the decoder goes on."""
        decoder = sequence.decoder or planned_decoder(
            sequence.request,
            eos_token_ids=self._config.eos_token_ids,
            vocab=self._vocab,
            shift=self._config.shift_logits,
        )
        sequence.decoder = None if sequence.is_canvas else decoder
        self._runs[sequence.row] = PlannedRun(sequence, decoder, self._cache.k.device)
        sequence.seated = True

    def leave(self, row: int) -> None:
        self._runs.pop(row, None)

    def hold_to(self, num_blocks: int, *, drafts: bool) -> None:
        """The engine's budget leaves every request so many blocks in the next forward, if it is adaptive; none, if it
        may draft and is not to (`drafts`)."""
        for run in self._runs.values():
            blocks = num_blocks if run.sequence.request.decoding.adaptive else MOST
            run.decoder.hold_to(0 if run.may_draft and not drafts else blocks)

    def choices(self, num_soon: int) -> Choices:
        """What the next forward carries without prompts, by the choice of those that may draft. The others are taken
        to do as in their last one. Of the `num_soon` requests with planned rows that decode soon, those whose prompt
        is not stored yet count as if they drafted as the last one does: a draft is verified beside them."""
        lengths = [run.decoder.draft_length for run in self._runs.values() if run.may_draft]
        others = sum(run.num_positions for run in self._runs.values() if not run.may_draft)
        lengths += lengths[-1:] * (num_soon - len(self._runs))
        rows = max(num_soon, len(self._runs))
        return Choices(
            drafts=Load(rows, others + sum(lengths)), single=Load(rows, others + len(lengths)), number=len(lengths)
        )

    def rows(self, *, num_before: int, adapts: bool = False) -> Rows | None:
        """The next forward of every request, behind `num_before` packed tokens of others; copies between lanes that it
        needs are made at once. `None` without requests. `adapts`: some row of the forward has a LoRA adapter."""
        if not self._runs:
            return None
        device = self._cache.k.device
        tokens, positions, lengths, kv_lens, pages, logits_at, causal, slots = [], [], [], [], [], [], [], []
        places = np.arange(max(run.decoder.length for run in self._runs.values()))
        for run in self._runs.values():
            run.plan, run.num_positions = run.decoder.plan(), 0
            for source, target in run.plan.copies:
                self._cache.copy_pages(run.lanes_LP[source], run.lanes_LP[target])
            for q in run.plan.queries:
                tokens.append(q.tokens)
                positions.append(places[q.start : q.stop])
                lengths.append(q.stop - q.start)
                kv_lens.append(run.decoder.length if q.num_keys is None else q.num_keys)
                pages.append(run.lanes_LP[q.lane])
                logits_at.append(q.logits_at.numpy() + (num_before - q.start))
                causal.append(q.causal and lengths[-1] > 1)
                slots.append(run.sequence.adapter_slot(drafts=q.drafts))
                num_before += lengths[-1]
                run.num_positions += lengths[-1]
        width = max(len(p) for p in pages)
        return Rows(
            tokens_T=torch.cat(tokens).to(device),
            positions_T=torch.from_numpy(np.concatenate(positions)).to(device),
            lengths_K=lengths,
            kv_lens_K=torch.tensor(kv_lens, device=device),
            pages_KP=torch.stack([p if len(p) == width else F.pad(p, (0, width - len(p))) for p in pages]),
            stored_K=torch.ones(len(lengths), dtype=torch.bool, device=device),
            logits_at_A=torch.from_numpy(np.concatenate(logits_at)).to(device),
            causal_K=torch.tensor(causal, device=device) if any(causal) else None,
            adapter_K=to_device(slots, device) if adapts else None,
            denoising=self._denoising(),
        )

    def _denoising(self) -> Denoising | None:
        """Which tokens of the next forward's rows are being denoised, and on what they are conditioned."""
        queries = [q for run in self._runs.values() for q in run.plan.queries]
        if not any(q.denoises for q in queries):
            return None
        cache = self._cache.k
        expected = [
            cache.new_zeros((len(q.tokens), self._config.hidden_size)) if q.expected is None else q.expected
            for q in queries
        ]
        at = torch.cat([torch.full((len(q.tokens),), q.denoises) for q in queries])
        return Denoising(at.to(cache.device), torch.cat(expected))

    def read(self, hidden_AD: Tensor, runner: ModelRunner, *, apart: bool) -> list[Any]:
        """What decoders read themselves of the hidden states of the positions that they ask for, in pieces. `apart`:
        each piece of logits is computed apart."""
        readings, start = [], 0
        for run in self._runs.values():
            assert run.reader is not None, "all requests of a model read alike"
            stop = start + sum(q.logits_at.numel() for q in run.plan.queries)
            own_AD = hidden_AD[start:stop]

            def logits_of(part: slice, own_AD: Tensor = own_AD) -> Tensor:
                return runner.logits(own_AD[part], split=[part.stop - part.start] if apart else None)

            readings.append(run.reader.read(logits_of, runner.expected_embedding))
            start = stop
        return readings

    @property
    def reads(self) -> bool:
        """Whether decoders read their logits themselves (`ReadingDecoder`)."""
        return any(run.reader is not None for run in self._runs.values())

    def update(self, planned: Tensor | list[Any]) -> list[tuple[PlannedRun, CanvasUpdate]]:
        """Hand every decoder its part of the logits (A, V) of `rows()`, or what it read of them; what each made of
        it."""
        if not isinstance(planned, Tensor):
            pairs = zip(self.running, planned, strict=True)
            return [(run, run.reader.take(r)) for run, r in pairs if run.reader is not None]
        logits_AV = planned
        parts, runs = iter(logits_AV.split(self.num_asked)), self.running
        open_logits = [run.decoder.open_logits([next(parts) for _ in run.plan.queries]) for run in runs]
        guesses = guess(open_logits) if open_logits else []
        return [(run, run.decoder.accept(o, g)) for run, o, g in zip(runs, open_logits, guesses, strict=True)]

    @property
    def num_asked(self) -> list[int]:
        """Positions asked for in each row of the forward."""
        return [q.logits_at.numel() for run in self._runs.values() for q in run.plan.queries]

    @property
    def num_alike(self) -> list[int]:
        """Positions whose logits are computed together where each row is computed apart: those of a causal row one by
        one, as if they had been asked for one by one."""
        sizes: list[int] = []
        for run in self._runs.values():
            for q in run.plan.queries:
                number = q.logits_at.numel()
                sizes += [1] * number if q.causal and number else [number]
        return sizes

    @property
    def running(self) -> Sequence[PlannedRun]:
        return list(self._runs.values())


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The rows of one forward, group behind group: prompt chunks, slots, planned rows.

    num_asked     positions of slots that get logits: the first of the forward's hidden states
    at_A          places of the flattened buffer that they belong to, `None`: all in order. A place past the last one
                  is padding
    slot_end_RN   the packed token at which each slot ends
    prompt_ends   (batch row, packed token) at which a sequence's prefix ends in this forward
    planned_asked  positions of planned rows with logits, behind those of slots, in parts that are computed together;
                   `None` without such rows
    read_planned  where their decoders read the logits themselves: `PlannedRuns.read`
    """

    groups: list[Rows]
    num_asked: int = 0
    at_A: Tensor | None = None
    slot_end_RN: Tensor | None = None
    prompt_ends: list[tuple[int, int]] = field(default_factory=list)
    planned_asked: list[int] | None = None
    read_planned: Callable[..., list[Any]] | None = None


def packed_rows(
    buffer: BlockBuffer | None,
    tables_RP: Tensor,
    chunks: Sequence[PrefillChunk],
    slot_rows: "SlotRows",
    planned: PlannedRuns,
    *,
    version: int,
    block_size: int,
    shift: bool,
    softens: bool,
    whole: bool,
    adapters_R: Tensor | None = None,
) -> StepRows:
    """Prompt chunks, resident slots (Alg. 4) of `buffer`, if there is one, and planned rows.

    shift       logits predict the next position (predicted from the hidden state before it)
    softens     embed filled positions as DMax's mixtures
    whole       logits at every position of a slot, so that a row's product has the same shape whatever is open in it
    adapters_R  the slot of each batch row's LoRA adapter, `None` where no sequence has one
    version     numbers what `tables_RP` and `adapters_R` hold
    """
    prompts = [prompt_rows(chunks, tables_RP, block_size=block_size, adapters_R=adapters_R)] if chunks else []
    num_tokens, ends = sum(c.stop - c.start for c in chunks), _prompt_ends(chunks)
    slots = StepRows(groups=[])
    if buffer is not None:
        slots = slot_rows.lay_out(
            buffer.host,
            tables_RP,
            version=version,
            num_before=num_tokens,
            prompt_ends=ends,
            shift=shift,
            softens=softens,
            whole=whole,
            adapters_R=adapters_R,
        )
    num_tokens += sum(len(g.tokens_T) for g in slots.groups)
    planned_rows = planned.rows(num_before=num_tokens, adapts=adapters_R is not None)
    return replace(
        slots,
        groups=[*prompts, *slots.groups, *([] if planned_rows is None else [planned_rows])],
        prompt_ends=ends,
        planned_asked=None if planned_rows is None else planned.num_alike,
        read_planned=planned.read if planned.reads else None,
    )


def prompt_rows(
    chunks: Sequence[PrefillChunk], tables_RP: Tensor, *, block_size: int, adapters_R: Tensor | None = None
) -> Rows:
    """Blocks of prefixes to be stored, a row each; a prompt under full attention is one row, and so is a causal
    chunk."""
    device = tables_RP.device
    tokens: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    rows: list[int] = []
    causal: list[bool] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.start : chunk.stop]
        size = chunk.sequence.store
        step = size if size is not None and chunk.start >= chunk.sequence.origin else chunk.stop - chunk.start
        row_starts = range(chunk.start, chunk.stop, step)
        starts += row_starts
        lengths += [step] * len(row_starts)
        rows += [chunk.sequence.row] * len(row_starts)
        causal += [size is None] * len(row_starts)
    starts_K, lengths_K = to_device([starts, lengths], device)
    rows_K = to_device(rows, device)
    offset_K = starts_K - (lengths_K.cumsum(0) - lengths_K)
    return Rows(
        tokens_T=to_device(tokens, device),
        positions_T=torch.arange(len(tokens), device=device)
        + offset_K.repeat_interleave(lengths_K, output_size=len(tokens)),
        lengths_K=block_size if all(n == block_size for n in lengths) else lengths,
        kv_lens_K=starts_K + lengths_K,
        pages_KP=tables_RP[rows_K],
        stored_K=torch.ones(len(rows), dtype=torch.bool, device=device),
        logits_at_A=torch.zeros(0, dtype=torch.int64, device=device),
        causal_K=torch.tensor(causal, device=device) if any(causal) else None,
        adapter_K=None if adapters_R is None else adapters_R[rows_K],
    )


def _prompt_ends(chunks: Sequence[PrefillChunk]) -> list[tuple[int, int]]:
    """Of the chunks that complete their sequence's prefix: its batch row, and the packed token at which it ends."""
    ends, stop = [], 0
    for chunk in chunks:
        stop += chunk.stop - chunk.start
        if chunk.stop == chunk.sequence.prefix_length:
            ends.append((chunk.sequence.row, stop - 1))
    return ends


@dataclass(frozen=True)
class ResidentSlots:
    """The resident slots of a buffer, as they are laid out while they stay where they stand.

    slot_K   the place of each in the buffer
    place_P  the places of their positions in the flattened buffer
    shape    of the buffer, (R, N, B)
    rows     what their `Rows` have beside tokens
    """

    slot_K: Tensor
    place_P: Tensor
    shape: tuple[int, int, int]
    rows: dict[str, Any]

    @classmethod
    def of(
        cls,
        buffer: BlockBuffer,
        tables_RP: Tensor,
        adapters_R: Tensor | None,
        *,
        layout: tuple[object, ...] | None = None,
    ) -> "ResidentSlots":
        size = buffer.block_size
        slot_K = places(buffer.resident_RN)
        row_K = slot_K // buffer.num_slots
        positions_KB = buffer.positions_RNB.reshape(-1, size)[slot_K]
        rows = {
            "positions_T": tensor_of(positions_KB.reshape(-1)),
            "lengths_K": size,
            "kv_lens_K": tensor_of(positions_KB[:, -1] + 1),
            "pages_KP": tensor_of(array_of(tables_RP)[row_K]),
            "stored_K": tensor_of(ones_like(row_K) > 0),
            "adapter_K": None if adapters_R is None else tensor_of(array_of(adapters_R)[row_K]),
            "layout": layout,
        }
        place_P = (slot_K[:, None] * size + arange(slot_K, size)).reshape(-1)
        return cls(slot_K, place_P, (len(buffer.state_RN), buffer.num_slots, size), rows)

    @cached_property
    def before_P(self) -> Tensor:
        """Of each position the packed token before it: the last of the slot in front, or -1 - r for what the runner
        remembers of row r."""
        _, num_slots, size = self.shape
        opens_P = self.place_P % (num_slots * size) == 0
        packed_P = arange(self.place_P, len(self.place_P))
        return where(opens_P, -1 - self.place_P // (num_slots * size), packed_P - 1)

    @cached_property
    def slot_end_RN(self) -> Tensor:
        """The packed token at which each slot ends."""
        num_rows, num_slots, size = self.shape
        ends_K = arange(self.slot_K, size - 1, len(self.place_P), size)
        return placed(ends_K, self.slot_K, num_rows * num_slots).reshape(num_rows, num_slots)


class SlotRows:
    """Lays out the resident slots (Alg. 4) of an engine's buffer. On a CPU, slots that stand where they stood in the
    forward before, in the same pages, are laid out as they were."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._slots: ResidentSlots | None = None

    def _resident(
        self, buffer: BlockBuffer, tables_RP: Tensor, adapters_R: Tensor | None, version: int
    ) -> ResidentSlots:
        if isinstance(buffer.state_RN, Tensor):
            return ResidentSlots.of(buffer, tables_RP, adapters_R)
        starts_R = buffer.positions_RNB[:, 0, 0]
        key = (version, tables_RP.shape[1], adapters_R is None, buffer.resident_RN.tobytes(), starts_R.tobytes())
        if self._slots is None or key != self._key:
            self._key, self._slots = key, ResidentSlots.of(buffer, tables_RP, adapters_R, layout=key)
        return self._slots

    def lay_out(
        self,
        buffer: BlockBuffer,
        tables_RP: Tensor,
        *,
        version: int,
        num_before: int,
        prompt_ends: list[tuple[int, int]],
        shift: bool,
        softens: bool,
        whole: bool,
        adapters_R: Tensor | None = None,
    ) -> StepRows:
        """Those of a buffer's `host` behind `num_before` packed tokens; logits where a position can change, or in
        `whole` slots. `version` numbers what the page tables and adapters of rows hold."""
        size = buffer.block_size
        slots = self._resident(buffer, tables_RP, adapters_R, version)

        def resident(x_RNB: Tensor) -> Tensor:
            return x_RNB.reshape(-1, size)[slots.slot_K].reshape(-1)

        asked_at_A = places(ones_like(slots.place_P) > 0 if whole else resident(buffer.asked_RNB))
        at_A = slots.place_P[asked_at_A]
        hidden_at_A = asked_at_A + num_before
        if shift:
            # in front of slot 0 stands the last committed position: in this forward if its chunk is, else remembered
            before_A = slots.before_P[asked_at_A]
            if num_before:
                before_A = where(before_A < 0, before_A, before_A + num_before)
            for end_row, end in prompt_ends:
                before_A = where(before_A == -1 - end_row, end, before_A)
            if not none_on_cpu(buffer.settings.carries_R):
                stores_A = (at_A % size == 0) & buffer.carried_RN.reshape(-1)[at_A // size]
                before_A = where(stores_A, hidden_at_A + (size - 1), before_A)
            hidden_at_A = before_A
        rows = Rows(
            tokens_T=tensor_of(resident(buffer.tokens_RNB)),
            logits_at_A=tensor_of(hidden_at_A),
            weight_T=tensor_of(resident(buffer.weight_RNB)) if softens else None,
            **slots.rows,
        )
        slot_end_RN = tensor_of(slots.slot_end_RN + num_before) if shift else None
        return StepRows(groups=[rows], num_asked=len(at_A), at_A=tensor_of(at_A), slot_end_RN=slot_end_RN)


def static_rows(
    buffer: BlockBuffer,
    tables_RP: Tensor,
    *,
    num_slots: int,
    shift: bool,
    softens: bool,
    num_asked: int | None = None,
    adapters_R: Tensor | None = None,
) -> StepRows:
    """The first `num_slots` slots of every batch row, resident or not (Alg. 5): shapes that depend on no value.

    The slots behind them must be empty. A slot that is not resident attends to one key and stores into the null page;
    what comes of it is not read. Logits are asked at the first `num_asked` positions that can change, of which there
    must not be more, or (`None`) everywhere.
    """
    size, resident_RN = buffer.block_size, buffer.resident_RN[:, :num_slots]
    num_rows, device = len(resident_RN), resident_RN.device
    positions_RNB = buffer.positions_RNB[:, :num_slots]
    hidden_at_RNB = torch.arange(num_rows * num_slots * size, device=device).view(num_rows, num_slots, size)
    slot_end_RN = hidden_at_RNB[..., -1]
    if shift:
        front_at_R1 = -1 - torch.arange(num_rows, device=device)[:, None]
        hidden_at_RNB = torch.cat((front_at_R1, hidden_at_RNB.flatten(1)[:, :-1]), dim=1).view_as(hidden_at_RNB)
        hidden_at_RNB[..., 0] = torch.where(buffer.carried_RN[:, :num_slots], slot_end_RN, hidden_at_RNB[..., 0])
    hidden_at_A, at_A = hidden_at_RNB.flatten(), None
    if num_asked is not None:
        total = hidden_at_A.numel()
        at_A = torch.nonzero_static(buffer.asked_RNB[:, :num_slots].flatten(), size=num_asked, fill_value=total)[:, 0]
        hidden_at_A = hidden_at_A[at_A.clamp(max=total - 1)]
    elif num_slots < buffer.num_slots:
        at_A = torch.arange(hidden_at_A.numel(), device=device)
    if at_A is not None:  # from places among these slots to places in the buffer
        at_A = at_A + at_A // (num_slots * size) * ((buffer.num_slots - num_slots) * size)
    rows = Rows(
        tokens_T=buffer.tokens_RNB[:, :num_slots].flatten(),
        positions_T=positions_RNB.flatten(),
        lengths_K=size,
        kv_lens_K=torch.where(resident_RN, positions_RNB[..., -1] + 1, 1).flatten(),
        pages_KP=tables_RP.repeat_interleave(num_slots, dim=0, output_size=num_rows * num_slots),
        stored_K=resident_RN.flatten(),
        logits_at_A=hidden_at_A,
        weight_T=buffer.weight_RNB[:, :num_slots].flatten() if softens else None,
        adapter_K=None
        if adapters_R is None
        else adapters_R.repeat_interleave(num_slots, output_size=num_rows * num_slots),
        rows_each=num_slots,
        live_K=resident_RN.flatten(),
    )
    return StepRows(groups=[rows], num_asked=len(hidden_at_A), at_A=at_A, slot_end_RN=slot_end_RN)
