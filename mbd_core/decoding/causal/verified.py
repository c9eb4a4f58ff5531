"""Block by block behind a stored prefix, each draft of a block judged by the same weights at block size 1 (`Verify`).

draft     [a, M, M, b, M]             no order -> tokens for all masks, by the whole block
    judge     [a, x1, x2] + [M, M]        causal; the copy of the masks stands behind the block -> x1, x2
    store     [a, x1, x2, b, x3]          by `Verify.store`

A mask of the copy has the position of its draft. It sees what stands before that position, drafts included, and
itself; so its logits are those of a model that decodes position after position. Where logits predict the next position
(`carry`), the causal row of the draft judges itself, and there is no copy.

A draft that is not judged is accepted by confidence (`tau_m2t`, `tokens_per_step`). Keys of drafts and judgements are
overwritten by the next row; the copy's lie past the stored tokens. The answer is handed out block by block.

All noise is a hash of the request's seed, the position, and the number of the block's forward. So a block that begins
anew on another replica comes out the same.
"""

from dataclasses import dataclass, replace
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

VerifyPhase = Literal["draft", "judge", "store"]


@dataclass(frozen=True)
class Span:
    """The part of a draft that is judged next: offsets [start, stop) of the block, and the draft of all its masks.

    logits_PV  what the span's tokens were read from
    quota      masks of the block that this draft must fill
    """

    start: int
    stop: int
    guesses: Guesses
    logits_PV: Tensor
    quota: int

    @property
    def length(self) -> int:
        return self.stop - self.start


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
        self._phase: VerifyPhase = "draft"
        self._span: Span | None = None
        self._logits_PV: Tensor | None = None  # of the draft under way
        self._forward = self._num_final = 0  # forwards of the block, and those since its last mask
        self._begin_block([], [])

    def plan(self) -> CanvasPlan:
        start, stop, causal = self.num_stored, self.num_stored + self._size, self._rule.store == "causal"
        if self._phase == "store":
            asked = torch.tensor([stop - 1] if self._decoding.carry else [], dtype=torch.int64)
            return _rows(Query(0, start, stop, torch.tensor(self._block), asked, num_keys=stop, causal=causal))
        if self._phase == "judge":
            return self._judgement()
        first = start + (self._open[0] if self._rule.lead == "causal" and self._open else 0)
        lead = [self._row(start, first, causal=True)] if first > start else []
        return _rows(*lead, self._row(first, stop, causal=False))

    def open_logits(self, logits: list[Tensor]) -> OpenLogits:
        logits_PV = torch.cat(logits) if len(logits) > 1 else logits[0]
        start = self.num_stored
        if self._phase == "store":
            positions = [start + self._size] if self._decoding.carry else []
        elif self._phase == "judge":
            span = self._span
            assert span is not None
            at_P = torch.arange(start + span.start, start + span.stop)
            token_P = torch.from_numpy(span.guesses.token_P[: len(at_P)]).to(logits_PV.device)
            return OpenLogits(
                logits_PV=logits_PV,
                position_P=torch.cat((at_P, at_P)),
                forward=self._forward,
                score="confidence",
                sampling=self._request.sampling,
                vocab=self._vocab,
                draft=Draft(token_P, span.logits_PV, self._rule, self._noise),
            )
        else:
            self._logits_PV = logits_PV
            positions = [start + offset for offset in self._asked()]
        return OpenLogits(
            logits_PV=logits_PV,
            position_P=torch.tensor(positions, dtype=torch.int64),
            # the store draws for the next block, whose forwards are counted from 0 wherever the answer is taken up
            forward=0 if self._phase == "store" else self._forward,
            score=self._score,
            sampling=self._request.sampling,
            vocab=self._vocab,
        )

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate:
        start, number = self.num_stored, len(self._open)
        self.num_forwards += 1
        self._forward += 1
        if self._phase == "store":
            self._append_block(num_stored=start + self._size)
            if not self.done:
                self._begin_block(*guessed(guesses))
            return self._update(start, 0, 0.0)
        edited = confirmed = 0
        judged = self._span if self._phase == "judge" else None
        if judged is not None:
            confirmed = self._take_judgement(judged, guesses)
        else:
            edited = self._take_draft(guesses)
        update = self._update(start, number - len(self._open), number / self._size)
        if judged is not None:
            update = replace(update, drafted=judged.length, confirmed=confirmed)
        if edited:
            update = replace(update, edited=dict.fromkeys(update.accepted, edited))
        if self._phase == "draft":
            is_stored = judged is not None and confirmed == judged.length and self._stores(judged)
            self._end_block_if_final(edited=edited, had_masks=number > 0, is_stored=is_stored)
        return update

    # -- drafts and judgements ----------------------------------------------------------------------------------

    def _judgement(self) -> CanvasPlan:
        """The rows of a verification."""
        start, span = self.num_stored, self._span
        assert span is not None
        stop, number = start + span.stop, span.length
        filled = list(self._block[: span.stop])
        filled[span.start :] = span.guesses.token_P[:number].tolist()
        none, shift = torch.zeros(0, dtype=torch.int64), int(self._decoding.carry)
        at = torch.arange(start + span.start, stop) - shift
        draft = Query(0, start, stop, torch.tensor(filled), at if shift else none, num_keys=stop, causal=True)
        if shift:
            return _rows(draft)
        behind = start + span.start + self._size
        masks = torch.full((number,), self._vocab.mask_token_id)
        places = torch.arange(behind, behind + number)
        copy = Query(0, behind, behind + number, masks, places, num_keys=behind + number, causal=True, gap=self._size)
        return _rows(draft, copy)

    def _row(self, start: int, stop: int, *, causal: bool) -> Query:
        """A row of the block's present tokens; it gives the logits that a draft needs, as far as they are its."""
        at = [self.num_stored + offset - self._decoding.carry for offset in self._asked()]
        own = torch.tensor(self._block[start - self.num_stored : stop - self.num_stored])
        inside = torch.tensor([place for place in at if start <= place < stop], dtype=torch.int64)
        return Query(0, start, stop, own, inside, num_keys=stop, causal=causal)

    def _asked(self) -> list[int]:
        """The offsets whose logits a draft needs: the masks, and with edits all filled tokens of the answer."""
        if self._decoding.t2t is None:
            return self._window()
        return list(range(self._first, self._stop))

    def _window(self) -> list[int]:
        """The masks that may be filled now: those of the leftmost part of the block that has any."""
        part = self._decoding.sub_block or self._size
        return [offset for offset in self._open if offset // part == self._open[0] // part]

    def _take_draft(self, guesses: Guesses) -> int:
        """Edits filled tokens; then lets the masks' draft be judged, or accepts of it by confidence; the number of
        edits."""
        asked, edited = self._asked(), 0
        if self._decoding.t2t is not None:
            edited = self._edit(guesses)
        masks = self._window()
        if not masks:
            self._router.skip()
            return edited
        at = [i for i, offset in enumerate(asked) if offset in masks]
        drafted = guesses.select(np.array(at))
        length = first_run(masks)
        quota = min(self._decoding.tokens_per_step, len(masks))
        num_confident = int((drafted.confidence_P > self._decoding.tau_m2t).sum())
        if self._router.verifies(drafted.score_P[:length], num_confident):
            assert self._logits_PV is not None
            self._span = Span(masks[0], masks[0] + length, drafted, self._logits_PV[at[:length]], quota)
            self._phase = "judge"
        else:
            self._accept_confident(drafted, quota)
        self._logits_PV = None
        return edited

    def _take_judgement(self, span: Span, guesses: Guesses) -> int:
        """Fills what a judgement decides; the number of drafted tokens that it accepts."""
        number = span.length
        accepted = number_accepted([score > 0 for score in guesses.score_P[:number].tolist()])
        tokens, log_probs = guessed(guesses)
        for i in range(accepted):
            self._fill(span.start + i, tokens[i], log_probs[i])
        if accepted < number:
            self._fill(span.start + accepted, tokens[number + accepted], log_probs[number + accepted])
        decided = accepted + (accepted < number)
        if decided < span.quota:
            left = np.array([offset in self._open for offset in span.guesses.position_P - self.num_stored])
            self._accept_confident(span.guesses.select(left), span.quota - decided)
        self._phase, self._span = "draft", None
        return accepted

    def _stores(self, span: Span) -> bool:
        """Whether a judgement that accepts all of `span` has stored the block: its row is the block, in order."""
        return self._rule.exact and span.stop == self._size and not self._decoding.carry

    def _accept_confident(self, drafted: Guesses, quota: int) -> None:
        """Fills all masks above the threshold, or if they are fewer than `quota` the most confident ones."""
        accepted_P = drafted.confidence_P > self._decoding.tau_m2t
        if accepted_P.sum() < quota:
            accepted_P = accept_best(drafted.confidence_P, quota)
        chosen = drafted.select(accepted_P)
        for position, token, log_prob in zip(chosen.position_P.tolist(), *guessed(chosen), strict=True):
            self._fill(position - self.num_stored, token, log_prob)

    def _edit(self, guesses: Guesses) -> int:
        """Replaces filled tokens that another token exceeds (T2T); returns their number."""
        assert self._decoding.t2t is not None
        edited = 0
        sure_P = guesses.confidence_P > self._decoding.t2t.tau
        tokens, log_probs = guessed(guesses)
        for offset, token, log_prob, is_sure in zip(self._asked(), tokens, log_probs, sure_P.tolist(), strict=True):
            if offset not in self._open and is_sure and token != self._block[offset]:
                self._block[offset], self._block_log_probs[offset] = token, log_prob
                self._block_steps[offset] = self.num_forwards
                edited += 1
        return edited

    # -- the block ------------------------------------------------------------------------------------------------

    def _fill(self, offset: int, token: int, log_prob: float) -> None:
        self._block[offset], self._block_log_probs[offset] = token, log_prob
        self._block_steps[offset] = self.num_forwards
        self._open.remove(offset)

    def _begin_block(self, seed: list[int], log_probs: list[float]) -> None:
        """Begins a block: known tokens that are not stored, the seed, masks up to the answer's end and beyond."""
        known = [*self._all[self.num_stored :], *seed]
        size, number = self._size, len(known)
        self._first = len(known) - len(seed)
        self._stop = min(size, self._end - self.num_stored)
        self._block = [*known, *[self._vocab.mask_token_id] * (size - number)]
        self._block_log_probs = [*[0.0] * (number - len(seed)), *log_probs, *[0.0] * (size - number)]
        self._block_steps = [self.num_forwards] * size
        self._open = list(range(number, self._stop))
        self._phase, self._span = "draft" if self._open else "store", None
        self._forward = self._num_final = 0
        if seed and (self._has_end() or self.num_stored + number == self._end):
            self._append_block(num_stored=self.num_stored)

    def _end_block_if_final(self, *, edited: int, had_masks: bool, is_stored: bool) -> None:
        """Goes on to the block's store, or ends the answer, once no token of the block changes any more."""
        t2t = self._decoding.t2t
        if t2t is None:
            is_final = not self._open or self._has_end()
        else:
            self._num_final += not had_masks
            is_final = not self._open and ((not had_masks and not edited) or self._num_final >= t2t.max_edits)
        if not is_final:
            return
        if self._has_end() or self.num_stored + self._size >= self._end:
            self._append_block(num_stored=self.num_stored)
        elif is_stored:
            self._append_block(num_stored=self.num_stored + self._size)
            self._begin_block([], [])
        else:
            self._phase = "store"

    def _has_end(self) -> bool:
        """Whether a token before the block's first mask ends the answer."""
        stop = self._open[0] if self._open else self._stop
        return any(token in self._ends for token in self._block[self._first : stop])

    def _append_block(self, *, num_stored: int) -> None:
        """Hands out the block's tokens before its first mask."""
        new = slice(len(self._all) - self.num_stored, self._open[0] if self._open else self._stop)
        self._append(self._block[new], self._block_log_probs[new], self._block_steps[new], num_stored=num_stored)


def _rows(*queries: Query) -> CanvasPlan:
    return CanvasPlan([], list(queries))
