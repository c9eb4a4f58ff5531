"""The requests whose decoders plan their rows on the host: on a canvas, or after a stored prefix.

The file holds their decoders, their pages, and their rows of a forward.

Shape legend: K rows, T packed tokens, P pages a row, A positions asked for, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.canvas.plan import (
    CanvasPlan,
    CanvasUpdate,
    Guesses,
    GuidedDecoder,
    PlannedDecoder,
    ReadingDecoder,
)
from mbd_core.decoding.canvas.unmasking import guess
from mbd_core.decoding.causal.drafted import DraftedDecoder, DraftPair
from mbd_core.decoding.causal.planned import planned_decoder
from mbd_core.decoding.causal.verified import VerifyingDecoder
from mbd_core.decoding.grammar.closings import Search
from mbd_core.decoding.grammar.guide import Guide
from mbd_core.engine.memory.pages import PagedKVCache
from mbd_core.engine.schedule.draft_lengths import ConfirmedRates, DraftLengths
from mbd_core.engine.schedule.drafting import DraftChoices
from mbd_core.engine.schedule.forward_seconds import StepLoad
from mbd_core.engine.sequences.sequence import SequenceState
from mbd_core.engine.step.batch import BatchRows, to_device
from mbd_core.engine.step.runner import ModelRunner
from mbd_core.engine.step.steering import Decision, SharedWork
from mbd_core.fields import MOST
from mbd_core.models.gemma import Denoising
from mbd_core.models.model_config import ModelConfig


@dataclass
class PlannedRun:
    """One running request, its decoder and the plan of its next forward; the pages of each lane are (lanes, P).

    rates          the chances that its drafted tokens are confirmed
    measured       the decoder, if the engine chooses the blocks of its drafts
    may_draft      whether the engine chooses between drafts and single tokens, which give the same answer
    num_positions  positions of the plan
    """

    sequence: SequenceState
    decoder: PlannedDecoder
    device: torch.device
    rates: ConfirmedRates
    plan: CanvasPlan = field(default_factory=lambda: CanvasPlan([], []))
    reader: ReadingDecoder | None = field(init=False)  # the decoder, if it reads its logits itself
    measured: VerifyingDecoder | None = field(init=False)
    may_draft: bool = field(init=False)
    num_positions: int = 0
    _lanes_LP: Tensor = field(default_factory=lambda: torch.zeros((0, 0), dtype=torch.int64))

    def __post_init__(self) -> None:
        self.reader = self.decoder if isinstance(self.decoder, ReadingDecoder) else None
        rule, decoder = self.sequence.request.decoding.verify, self.decoder
        is_measured = rule is not None and rule.slots == "measured"
        self.measured = decoder if is_measured and isinstance(decoder, VerifyingDecoder) else None
        self.may_draft = self.decoder.draft_length > 1 and self.sequence.request.decoding.adaptive

    @property
    def lanes_LP(self) -> Tensor:
        if self._lanes_LP.numel() != len(self.sequence.pages):
            self._lanes_LP = to_device(self.sequence.pages, self.device).view(self.decoder.num_lanes, -1)
        return self._lanes_LP


class PlannedRuns:
    """All requests with planned rows that hold a batch row."""

    def __init__(
        self, config: ModelConfig, cache: PagedKVCache, vocab: Vocab, *, pair: DraftPair | None = None
    ) -> None:
        """`pair` is given if the engine has a draft model."""
        self._config, self._cache, self._pair = config, cache, pair
        self._vocab = vocab
        self._runs: dict[int, PlannedRun] = {}
        self._lengths = DraftLengths()
        self._load: StepLoad | None = None  # of the last forward, if the engine chooses the drafts of some request

    def join(self, sequence: SequenceState) -> None:
        """Begins a sequence in its row. After a preemption a canvas begins anew, because its keys are gone. A decoder
        after a prefix goes on, because the prefix is stored again."""
        decoder = sequence.decoder or planned_decoder(
            sequence.request,
            eos_token_ids=self._config.eos_token_ids,
            vocab=self._vocab,
            shift=self._config.shift_logits,
            guide=sequence.guide,
            pair=self._pair,
        )
        if isinstance(decoder, DraftedDecoder):
            decoder.forget_keys()
        sequence.decoder = None if sequence.is_canvas else decoder
        self._runs[sequence.row] = PlannedRun(sequence, decoder, self._cache.k.device, self._lengths.rates_of_answer())
        sequence.seated = True

    def leave(self, row: int) -> None:
        self._runs.pop(row, None)

    def hold_to(self, num_blocks: int, *, drafts: bool) -> None:
        """Limits every adaptive request to `num_blocks` blocks in the next forward. With `drafts` false, requests that
        may draft do not."""
        for run in self._runs.values():
            blocks = num_blocks if run.sequence.request.decoding.adaptive else MOST
            run.decoder.hold_to(0 if run.may_draft and not drafts else blocks)

    def choices(self, num_soon: int) -> DraftChoices:
        """Two loads of the next forward, prompts left out: one with drafts, one without. Requests that may not draft
        count as in their last forward.

        `num_soon` requests with planned rows decode soon. If their prompt is not stored yet, they count as drafting
        like the last request, because drafts are verified beside them.
        """
        lengths = [run.decoder.draft_length for run in self._runs.values() if run.may_draft]
        others = sum(run.num_positions for run in self._runs.values() if not run.may_draft)
        lengths += lengths[-1:] * (num_soon - len(self._runs))
        rows = max(num_soon, len(self._runs))
        return DraftChoices(
            drafts=StepLoad(rows, others + sum(lengths)),
            single=StepLoad(rows, others + len(lengths)),
            number=len(lengths),
        )

    def rows(self, *, num_before: int, adapts: bool = False) -> BatchRows | None:
        """The rows of every request in the next forward, after `num_before` packed tokens of other requests; `None`
        without requests. Copies between lanes are made at once. `adapts`: some row has a LoRA adapter."""
        for run in self._runs.values():
            run.plan = run.decoder.plan()
            run.num_positions = run.plan.num_positions
            for source, target in run.plan.copies:
                self._cache.copy_pages(run.lanes_LP[source], run.lanes_LP[target])
        return self._packed(by_draft_model=False, num_before=num_before, adapts=adapts)

    def draft_rows(self, *, num_before: int) -> BatchRows | None:
        """The draft model's rows of the forward that `rows` has planned."""
        return self._packed(by_draft_model=True, num_before=num_before)

    def _packed(self, *, by_draft_model: bool, num_before: int, adapts: bool = False) -> BatchRows | None:
        pairs = [(run, q) for run in self._runs.values() for q in run.plan.queries]
        queries = [(run, q) for run, q in pairs if q.by_draft_model is by_draft_model]
        if not queries:
            return None
        device = self._cache.k.device
        tokens, positions, lengths, kv_lens, pages, logits_at = [], [], [], [], [], []
        causal, gaps, slots = [], [], []
        places = np.arange(max(run.decoder.length for run in self._runs.values()))
        for run, q in queries:
            tokens.append(q.tokens)
            positions.append(places[q.start - q.gap : q.stop - q.gap])
            lengths.append(q.stop - q.start)
            kv_lens.append(run.decoder.length if q.num_keys is None else q.num_keys)
            pages.append(run.lanes_LP[q.lane])
            logits_at.append(q.logits_at.numpy() + (num_before - q.start))
            causal.append(q.causal and lengths[-1] > 1)
            gaps.append(q.gap)
            slots.append(run.sequence.adapter_slot(drafts=q.drafts))
            num_before += lengths[-1]
        width = max(len(p) for p in pages)
        return BatchRows(
            tokens_T=torch.cat(tokens).to(device),
            positions_T=torch.from_numpy(np.concatenate(positions)).to(device),
            lengths_K=lengths,
            kv_lens_K=torch.tensor(kv_lens, device=device),
            pages_KP=torch.stack([p if len(p) == width else F.pad(p, (0, width - len(p))) for p in pages]),
            stored_K=torch.ones(len(lengths), dtype=torch.bool, device=device),
            logits_at_A=torch.from_numpy(np.concatenate(logits_at)).to(device),
            causal_K=torch.tensor(causal, device=device) if any(causal) else None,
            gap_K=to_device(gaps, device) if any(gaps) else None,
            adapter_K=to_device(slots, device) if adapts else None,
            denoising=self._denoising(),
        )

    def _denoising(self) -> Denoising | None:
        """Which tokens of the next forward's rows are being denoised, and their conditions."""
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
        """The results of decoders that read the hidden states of their asked positions, in pieces. `apart`: each piece
        of logits is computed apart."""
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

    def update(
        self, planned: Tensor | list[Any], share: SharedWork, *, tries: float
    ) -> list[tuple[PlannedRun, CanvasUpdate]]:
        """Hands every decoder its part of the logits (A, V) of `rows()`, or its own reading of them; returns each
        decoder's update. Guides of answers under a grammar decide on one rank; `tries` bounds their work."""
        self._load = None
        if not isinstance(planned, Tensor):
            pairs = zip(self.running, planned, strict=True)
            return [(run, run.reader.take(r)) for run, r in pairs if run.reader is not None]
        logits_AV = planned
        parts, runs = iter(logits_AV.split(self.num_asked)), self.running
        open_logits = [run.decoder.open_logits([next(parts) for _ in run.plan.queries]) for run in runs]
        guesses = guess(open_logits) if open_logits else []
        decided = _decided(list(zip(runs, guesses, strict=True)), share, tries)
        updates = [
            (run, run.decoder.accept(o, g) if choice is None else _guided(run).accept_decided(o, g, choice))
            for run, o, g, choice in zip(runs, open_logits, guesses, decided, strict=True)
        ]
        if any(run.measured for run in runs):
            self._choose_lengths(updates, share)
        return updates

    def _choose_lengths(self, updates: list[tuple[PlannedRun, CanvasUpdate]], share: SharedWork) -> None:
        """Counts the judged drafts, and chooses the blocks of drafts that come next, by rank 0's measures."""
        drafted = sum(len(q.tokens) for run, _ in updates for q in run.plan.queries if q.by_draft_model)
        positions = sum(run.num_positions for run, _ in updates) - drafted
        self._load = StepLoad(len(updates), positions, draft_positions=drafted)
        asked = []
        for run, update in updates:
            if run.measured is None:
                continue
            if update.drafted:
                ends = run.sequence.request.ends(self._config.eos_token_ids)
                run.rates.observe(update.slots, ends)
                self._lengths.rates.observe(update.slots, ends)
            if rounds := run.measured.rounds:
                asked.append((run, run.measured, rounds))
        if not asked:
            return
        choose = partial(self._lengths.choose, num_running=len(updates))
        numbers = share(lambda: [choose(rounds, run.rates) for run, _, rounds in asked])
        for (_, decoder, _), number in zip(asked, numbers, strict=True):
            decoder.draft_blocks(number)

    def observe(self, seconds: float) -> None:
        """The last forward, of planned rows alone, took `seconds`."""
        if self._load is not None:
            self._lengths.seconds.observe(self._load, seconds)

    @property
    def num_asked(self) -> list[int]:
        """Positions asked for in each row of the forward."""
        return [q.logits_at.numel() for run in self._runs.values() for q in run.plan.queries]

    def num_alike(self, *, by_draft_model: bool = False) -> list[int]:
        """Group sizes for batch-invariant logits of one model: a whole row, or single positions of a causal row."""
        sizes: list[int] = []
        for q in (q for run in self._runs.values() for q in run.plan.queries):
            number = q.logits_at.numel()
            if q.by_draft_model is by_draft_model:
                sizes += [1] * number if q.causal and number else [number]
        return sizes

    @property
    def num_by_model(self) -> list[tuple[int, bool]]:
        """Positions asked for in each row, and whether the row is the draft model's."""
        return [(q.logits_at.numel(), q.by_draft_model) for run in self._runs.values() for q in run.plan.queries]

    @property
    def running(self) -> Sequence[PlannedRun]:
        return list(self._runs.values())


# Answers under a grammar: the guides are on one rank. They see each chosen token, and may replace it.


def _guided(run: PlannedRun) -> GuidedDecoder:
    assert isinstance(run.decoder, GuidedDecoder), "admission refuses a grammar with other planned decoders"
    return run.decoder


def _decided(
    runs: Sequence[tuple[PlannedRun, Guesses]], share: SharedWork, tries: float
) -> list[list[tuple[int, float]] | None]:
    """The decisions of guides: tokens and their probabilities for each run; `None` for a run without a grammar."""
    asked = [(run, guesses) for run, guesses in runs if run.sequence.guide is not None]
    decisions = iter(share(lambda: _decide(asked, Search(tries))) if asked else [])
    choices: list[list[tuple[int, float]] | None] = []
    for run, _ in runs:
        guide = run.sequence.guide
        if guide is None:
            choices.append(None)
            continue
        decision = next(decisions)
        guide.pending, guide.ended = decision.pending, decision.ended
        choices.append(decision.tokens)
    return choices


def _decide(asked: Sequence[tuple[PlannedRun, Guesses]], search: Search) -> list[Decision]:
    """One decision for each run; the guides that have waited longest decide first."""
    decisions: dict[int, Decision] = {}
    guides = [run.sequence.guide for run, _ in asked]
    waits = [guide.waited if isinstance(guide, Guide) else 0 for guide in guides]
    for number in sorted(range(len(asked)), key=lambda number: -waits[number]):
        (run, guesses), guide = asked[number], guides[number]
        assert isinstance(guide, Guide), "only the rank that has the guides decides"
        tokens = _guided(run).decide(guide, guesses, search)
        decisions[number] = Decision(tokens, guide.pending, guide.ended)
    return [decisions[number] for number in range(len(asked))]
