"""Drafts of one or more blocks after a stored prefix, judged by the same weights at block size 1 (`Verify`).

    draft     [a, M, M, b, M] [M, M, M, M, M]     block by block -> tokens for all masks
    judge     [a, x1, x2, b, x3, y1, y2, ...]     causal -> x1, x2, y1, y2, ...
              + [M, M] + [M, M, ...]              the copies of the judged masks, which stand after the blocks
    store     [a, x1, x2, b, x3]                  by `Verify.store`, in the next draft's forward if there is one

A mask of a copy has the position of its draft. It sees the tokens before that position, drafts included, and itself.
So its logits are those of a model that decodes position after position. If logits predict the next position
(`carry`), the causal row of the draft judges itself, and there is no copy.

With several slots (`buffer_size`) drafts are those of naive MultiBD (Alg. 4). One verification judges the first run of
each block's masks, in order. After a block with a refusal, blocks keep the tokens that were confirmed given the
drafts before them; an exact answer keeps no such token.

A draft that is not judged is accepted by confidence (`tau_m2t`, `tokens_per_step`). Keys of drafts and judgements are
overwritten by the next row; the copies' keys lie past the stored tokens. The answer is handed out block by block.

All noise is a hash of the request's seed, the position, and the number of a forward. With one slot a block's forwards
are counted, so that a block that begins anew on another replica comes out the same. With several slots the answer's
forwards are counted, because a position's drafts in two forwards must differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.verification import (
    Draft,
    HashedNoise,
    VerifyNoise,
    VerifyRouter,
    first_run,
    number_accepted,
)
from mbd_core.decoding.canvas.plan import CanvasPlan, CanvasUpdate, Guesses, OpenLogits, Query
from mbd_core.decoding.canvas.unmasking import accept_best
from mbd_core.decoding.causal.prefix import PrefixDecoder, guessed
from mbd_core.decoding.causal.verified_block import Span, VerifiedBlock

VerifyPhase = Literal["draft", "judge", "store"]


@dataclass(frozen=True, kw_only=True)
class DraftRound:
    """A draft that may come next, and its judgement: the masks of each block, and the positions of both forwards.

    by_draft_model  whether the engine's draft model drafts
    """

    masks: tuple[int, ...]
    num_drafted: int
    num_judged: int
    by_draft_model: bool = False


class VerifyingDecoder(PrefixDecoder):
    """Self-verified decoding of one request. `noise` may be given, to decode with known draws."""

    def __init__(
        self, request: Request, *, eos_token_ids: tuple[int, ...], vocab: Vocab, noise: VerifyNoise | None = None
    ) -> None:
        super().__init__(request, eos_token_ids=eos_token_ids, vocab=vocab)
        decoding = request.decoding
        assert decoding.verify is not None
        self._decoding, self._rule = decoding, decoding.verify
        self._row_length = self._size = decoding.block_size
        self._noise: VerifyNoise = noise or HashedNoise()
        self._router = VerifyRouter(decoding.verify, vocab.size)
        self._score: Literal["confidence", "margin", "neg_entropy"] = "confidence"
        if decoding.verify.route != "span":
            self._score = "margin" if decoding.verify.estimate == "margin" else "neg_entropy"
        self._draft_logits_PV: Tensor | None = None  # of the draft under way
        self._forward = 0
        self._blocks: list[VerifiedBlock] = []
        self._activate([], [])

    @property
    def phase(self) -> VerifyPhase:
        """The work of the next forward; a store alone gives no token."""
        if any(block.span is not None for block in self._blocks):
            return "judge"
        return "store" if all(block.is_final for block in self._blocks) else "draft"

    @property
    def judged_positions(self) -> list[int]:
        """The positions whose drafts the next forward judges."""
        return [p for block, span in self._spans() for p in range(block.start + span.start, block.start + span.stop)]

    @property
    def rounds(self) -> list[DraftRound]:
        """The drafts among which the engine now chooses (`Verify.slots`): of one block, of two, ...; none if it has no
        choice."""
        active = self._active_blocks
        if self._rule.slots == "all" or self.done or self.phase == "judge" or not active:
            return []
        first, room = active[0], self._decoding.buffer_size - (len(self._blocks) - len(active))
        starts = range(first.start + self._size, self._end, self._size)[: room - 1]
        masks = [len(first.open), *(min(self._size, self._end - start) for start in starts)]
        return [self._round(tuple(masks[:n]), first.start + n * self._size) for n in range(1, len(masks) + 1)]

    def _round(self, masks: tuple[int, ...], stop: int) -> DraftRound:
        """The draft of blocks with these masks, the last of which ends at `stop`."""
        positions = stop - self._front
        return DraftRound(masks=masks, num_drafted=positions, num_judged=positions + sum(masks))

    def draft_blocks(self, number: int) -> None:
        """Lets the next draft have this number of blocks, one of the choices of `rounds`."""
        for _ in range(len(self._active_blocks) - number):
            self._blocks.pop()  # after a block with masks an exact answer has only masks
        for _ in range(number - len(self._active_blocks)):
            self._begin_block([], [])

    @property
    def _active_blocks(self) -> list[VerifiedBlock]:
        return [block for block in self._blocks if not block.is_final]

    def plan(self) -> CanvasPlan:
        if self.phase == "judge":
            return self._judgement()
        rows: list[Query] = []
        for block in self._blocks:
            stop, causal = block.start + self._size, self._rule.store == "causal"
            if block.is_settled:
                asked = torch.tensor([stop - 1] if self._decoding.carry else [], dtype=torch.int64)
                rows.append(
                    Query(0, block.start, stop, torch.tensor(block.tokens), asked, num_keys=stop, causal=causal)
                )
                continue
            first = block.start + (block.open[0] if self._rule.lead == "causal" and block.open else 0)
            lead = [self._row(block, block.start, first, causal=True)] if first > block.start else []
            rows += [*lead, self._row(block, first, stop, causal=False)]
        return CanvasPlan([], rows)

    def open_logits(self, logits: list[Tensor]) -> OpenLogits:
        logits_PV = torch.cat(logits) if len(logits) > 1 else logits[0]
        phase, draft = self.phase, None
        if phase == "judge":
            spans = [span for _, span in self._spans()]
            tokens = np.concatenate([span.guesses.token_P[: span.length] for span in spans])
            drafted_PV = torch.cat([span.logits_PV for span in spans])
            draft = Draft(torch.from_numpy(tokens).to(logits_PV.device), drafted_PV, self._rule, self._noise)
            positions = self.judged_positions * 2
        elif phase == "store":
            positions = [self.num_stored + self._size] if self._decoding.carry else []
        else:
            self._draft_logits_PV = logits_PV
            positions = [block.start + offset for block in self._blocks for offset in self._asked(block)]
        return OpenLogits(
            logits_PV=logits_PV,
            position_P=torch.tensor(positions, dtype=torch.int64),
            # the store draws for the next block, whose forwards are counted from 0 wherever the answer is taken up
            forward=0 if phase == "store" else self._forward,
            score="confidence" if phase == "judge" else self._score,
            sampling=self._request.sampling,
            vocab=self._vocab,
            draft=draft,
        )

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate:
        phase, spans = self.phase, dict(self._spans())
        self.num_forwards += 1
        self._forward += 1
        finals = [block.is_final for block in self._blocks]
        edited = [0] * len(finals)
        confirmed = dict.fromkeys(spans, 0)
        for block in self._blocks:
            block.look()
        if phase == "judge":
            confirmed = self._take_judgements(spans, guesses)
        elif phase == "draft":
            edited = self._take_drafts(guesses)
        stored = self._number_stored(finals, spans, confirmed, phase)
        slots = tuple(
            block.slot(judged=spans.get(block), confirmed=confirmed.get(block, 0), stored=n < stored, was_final=final)
            for n, (block, final) in enumerate(zip(self._blocks, finals, strict=True))
        )
        places = [(0, max(0, slot.start - self._start) // self._size) for slot in slots]
        update = CanvasUpdate(
            accepted={place: len(slot.frame.accepted) for place, slot in zip(places, slots, strict=True)},
            mask_ratio={place: slot.mask_ratio for place, slot in zip(places, slots, strict=True)},
            edited={place: number for place, number in zip(places, edited, strict=True) if number},
            drafted=sum(span.length for span in spans.values()),
            confirmed=sum(confirmed.values()),
            slots=slots,
        )
        self._end_forward(stored, *(guessed(guesses) if phase == "store" else ([], [])))
        return update

    # -- drafts ------------------------------------------------------------------------------------------------------

    def _row(self, block: VerifiedBlock, start: int, stop: int, *, causal: bool) -> Query:
        """A row of the block's present tokens; it gives the logits of its positions that a draft needs."""
        at = [block.start + offset - self._decoding.carry for offset in self._asked(block)]
        own = torch.tensor(block.tokens[start - block.start : stop - block.start])
        inside = torch.tensor([place for place in at if start <= place < stop], dtype=torch.int64)
        return Query(0, start, stop, own, inside, num_keys=stop, causal=causal)

    def _asked(self, block: VerifiedBlock) -> list[int]:
        """The offsets whose logits a draft needs: the masks, and with edits all filled tokens of the answer."""
        if block.is_final:
            return []
        if self._decoding.t2t is None:
            return block.window(self._decoding.sub_block)
        return list(range(block.first, block.stop))

    def _take_drafts(self, guesses: Guesses) -> list[int]:
        """Takes each block's draft. Returns the number of edited tokens of each block."""
        edited, begin = [], 0
        may_fall_back = True  # the gate of Alg. 4: the block before has progressed
        assert self._draft_logits_PV is not None
        for block in self._blocks:
            part = slice(begin, begin := begin + len(self._asked(block)))
            progress, drafted = block.progress, guesses.select(part)
            edited.append(self._take_draft(block, drafted, self._draft_logits_PV[part], may_fall_back=may_fall_back))
            may_fall_back = progress >= self._decoding.tau_semi
        self._draft_logits_PV = None
        return edited

    def _take_draft(self, block: VerifiedBlock, guesses: Guesses, logits_PV: Tensor, *, may_fall_back: bool) -> int:
        """Edits filled tokens, then has the masks' draft judged, or accepts tokens of it by confidence.

        Returns the number of edits.
        """
        if block.is_final:
            return 0
        asked, edited = self._asked(block), 0
        if self._decoding.t2t is not None:
            edited = block.edit(guesses, self._decoding.t2t, step=self.num_forwards)
        masks = block.window(self._decoding.sub_block)
        if not masks:
            self._router.skip()
            block.num_complete_steps += 1
            t2t = self._decoding.t2t
            block.is_settled = t2t is None or not edited or block.num_complete_steps >= t2t.max_edits
            return edited
        at = [i for i, offset in enumerate(asked) if offset in masks]
        drafted = guesses.select(np.array(at))
        length = first_run(masks)
        quota = min(self._decoding.tokens_per_step, len(masks)) if may_fall_back else 0
        num_confident = int((drafted.confidence_P > self._decoding.tau_m2t).sum())
        if self._router.verifies(drafted.score_P[:length], num_confident):
            is_first = all(other.is_final for other in self._blocks[: self._blocks.index(block)])
            quota = quota if is_first else 0
            block.span = Span(masks[0], masks[0] + length, drafted, logits_PV[at[0] : at[0] + length], quota)
        else:
            self._accept_confident(block, drafted, quota)
        block.keep_draft(drafted)
        self._settle(block)
        return edited

    def _accept_confident(self, block: VerifiedBlock, drafted: Guesses, quota: int) -> None:
        """Fills all masks above the threshold, or the `quota` most confident masks if there are fewer."""
        accepted_P = drafted.confidence_P > self._decoding.tau_m2t
        if accepted_P.sum() < quota:
            accepted_P = accept_best(drafted.confidence_P, quota)
        chosen = drafted.select(accepted_P)
        for position, token, log_prob in zip(chosen.position_P.tolist(), *guessed(chosen), strict=True):
            block.fill(position - block.start, token, log_prob, step=self.num_forwards)

    def _settle(self, block: VerifiedBlock) -> None:
        """A block without masks is settled, unless its tokens may still be edited."""
        t2t = self._decoding.t2t
        if not block.open:
            block.is_settled = t2t is None or block.num_complete_steps >= t2t.max_edits

    # -- judgements --------------------------------------------------------------------------------------------------

    def _spans(self) -> Iterator[tuple[VerifiedBlock, Span]]:
        return ((block, block.span) for block in self._blocks if block.span is not None)

    def _judgement(self) -> CanvasPlan:
        """The rows of a verification: the blocks with their drafts, and the copies of the judged masks."""
        spans = list(self._spans())
        last, start, shift = spans[-1][0], self._blocks[0].start, int(self._decoding.carry)
        stop = last.start + spans[-1][1].stop
        drafts = [token for block in self._blocks[: self._blocks.index(last) + 1] for token in block.draft]
        at = torch.tensor(self.judged_positions if shift else [], dtype=torch.int64) - shift
        row = Query(0, start, stop, torch.tensor(drafts[: stop - start]), at, num_keys=stop, causal=True)
        gap = last.start + self._size - start
        return CanvasPlan([], [row] if shift else [row, *(self._copy(*pair, gap=gap) for pair in spans)])

    def _copy(self, block: VerifiedBlock, span: Span, *, gap: int) -> Query:
        start, stop = (block.start + offset + gap for offset in (span.start, span.stop))
        masks = torch.full((span.length,), self._vocab.mask_token_id)
        return Query(0, start, stop, masks, torch.arange(start, stop), num_keys=stop, causal=True, gap=gap)

    def _take_judgements(self, spans: dict[VerifiedBlock, Span], guesses: Guesses) -> dict[VerifiedBlock, int]:
        """Fills the tokens that a verification decides, block by block.

        Returns the number of drafted tokens that each block keeps.
        """
        number, begin, is_refused = len(guesses.token_P) // 2, 0, False
        confirmed = {}
        for block, span in spans.items():
            part = slice(begin, begin := begin + span.length)
            other = slice(number + part.start, number + part.stop)
            accepted = number_accepted((guesses.score_P[part] > 0).tolist())
            block.span = None
            if is_refused and self._rule.exact:
                confirmed[block] = 0
                continue
            confirmed[block] = accepted
            self._decide(block, span, accepted, guesses.select(part), guesses.select(other), corrects=not is_refused)
            is_refused |= accepted < span.length
            self._settle(block)
        return confirmed

    def _decide(
        self, block: VerifiedBlock, span: Span, accepted: int, drafted: Guesses, others: Guesses, *, corrects: bool
    ) -> None:
        """Fills a judged span's accepted tokens, a refusal's token, and by confidence what its quota still lacks."""
        for i, (token, log_prob) in enumerate(zip(*guessed(drafted.select(slice(0, accepted))), strict=True)):
            block.fill(span.start + i, token, log_prob, step=self.num_forwards)
        decided = accepted
        if accepted < span.length and corrects:
            tokens, log_probs = guessed(others)
            block.fill(span.start + accepted, tokens[accepted], log_probs[accepted], step=self.num_forwards)
            decided += 1
        if decided < span.quota:
            left = np.array([position - block.start in block.open for position in span.guesses.position_P.tolist()])
            self._accept_confident(block, span.guesses.select(left), span.quota - decided)

    # -- the blocks --------------------------------------------------------------------------------------------------

    @property
    def _front(self) -> int:
        """Where the first resident block begins, or would begin."""
        return self.num_stored

    @property
    def _mask_token_id(self) -> int:
        """The mask of the model that drafts."""
        return self._vocab.mask_token_id

    def _number_stored(
        self,
        finals: Sequence[bool],
        spans: dict[VerifiedBlock, Span],
        confirmed: dict[VerifiedBlock, int],
        phase: VerifyPhase,
    ) -> int:
        """The number of leading blocks that the forward stored. A draft stores the blocks that were final before; an
        exact verification stores the blocks whose drafts it accepts to the end, because its row is the block, in
        order."""
        number = 0
        for block, was_final in zip(self._blocks, finals, strict=True):
            span = spans.get(block)
            is_whole = span is not None and span.stop == self._size and confirmed[block] == span.length
            if phase == "judge" and not (self._rule.exact and is_whole and not self._decoding.carry):
                break
            if phase != "judge" and not was_final:
                break
            number += 1
        return number

    def _end_forward(self, num_stored: int, seed: list[int], log_probs: list[float]) -> None:
        """Hands out the stored blocks; ends the answer if its blocks are decided to its end, or begins the next block
        if it may."""
        for block in self._blocks[:num_stored]:
            self._append_block(block, num_stored=block.start + self._size)
            if self.done:  # blocks after an ending token count for nothing
                return
        del self._blocks[:num_stored]
        self._mark_final()
        if not self.done:
            self._activate(seed, log_probs)

    def _mark_final(self) -> None:
        """Marks the leading blocks that are settled; ends the answer if its blocks are decided to its end."""
        for n, block in enumerate(self._blocks):
            has_end = block.has_end(self._ends)
            if not (block.is_settled or (has_end and self._decoding.t2t is None)):
                break
            block.is_final = block.is_settled
            if has_end or block.start + self._size >= self._end:
                for decided in self._blocks[: n + 1]:
                    self._append_block(decided, num_stored=self.num_stored)
                return

    def _activate(self, seed: list[int], log_probs: list[float]) -> None:
        """Begins the next block if it may begin (Alg. 4 line 5). If the engine chooses the draft's blocks, only the
        first of them begins here."""
        active = self._active_blocks
        if (
            len(self._blocks) == self._decoding.buffer_size
            or self._front + len(self._blocks) * self._size >= self._end
            or any(block.span is not None or block.has_any_end(self._ends) for block in self._blocks)
            or (active and (self._rule.slots != "all" or active[-1].progress <= self._decoding.tau_add))
        ):
            return
        self._begin_block(seed, log_probs)

    def _begin_block(self, seed: list[int], log_probs: list[float]) -> None:
        """Begins a block: known tokens that are not stored, the seed, and masks, past the answer's end too."""
        start = self._front + len(self._blocks) * self._size
        known = [*self._all[start:], *seed]
        block = VerifiedBlock(
            start,
            known,
            first=len(known) - len(seed),
            stop=min(self._size, self._end - start),
            log_probs=log_probs,
            size=self._size,
            mask=self._mask_token_id,
            num_forwards=self.num_forwards,
        )
        self._blocks.append(block)
        if self._decoding.buffer_size == 1:
            self._forward = 0
        if seed and (block.has_end(self._ends) or start + len(known) == self._end):
            self._append_block(block, num_stored=self.num_stored)

    def _append_block(self, block: VerifiedBlock, *, num_stored: int) -> None:
        """Hands out the block's tokens before its first mask."""
        new = slice(len(self._all) - block.start, block.open[0] if block.open else block.stop)
        self._append(block.tokens[new], block.log_probs[new], block.steps[new], num_stored=num_stored)
