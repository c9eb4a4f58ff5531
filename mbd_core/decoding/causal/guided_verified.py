"""Verified drafts under a grammar: an exact answer is that of the same model at block size 1 under that grammar.

draft     the draft's tokens are chosen from left to right among the tokens that the grammar allows there
judge     the guide takes in, from left to right, the judgement's choices among the allowed tokens, as at block size 1.
          It stops after the first token that is not the draft's
forced    tokens that the grammar forces stand in the block at once; no forward drafts or judges them

Drawn drafts are judged as without a grammar (`judge`), by both distributions over the allowed tokens alone. So the
tokens that the guide takes in are drawn as at block size 1. A choice for which the guide has to wait is kept for it.

One rank has the guide and decides; the others take its decision. An exact answer has no gaps: its masks begin after
its last token, and each judged draft begins where the one before it ends, across slots too.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Draw, Vocab, allowed_alone, choose
from mbd_core.decoding.blocks.verification import Draft, judge
from mbd_core.decoding.canvas.plan import CanvasUpdate, Guesses, OpenLogits
from mbd_core.decoding.canvas.unmasking import noise_source
from mbd_core.decoding.causal.prefix import LEAST
from mbd_core.decoding.causal.verified import VerifyingDecoder
from mbd_core.decoding.causal.verified_block import Span, VerifiedBlock
from mbd_core.decoding.grammar.closings import Search
from mbd_core.decoding.grammar.guide import AllowedToken, Guide, GuideState


class GuidedVerifyingDecoder(VerifyingDecoder):
    """Exact self-verified decoding of one request under a grammar."""

    def __init__(self, request: Request, *, eos_token_ids: tuple[int, ...], vocab: Vocab, guide: GuideState) -> None:
        assert request.decoding.verify is not None and request.decoding.verify.exact
        self._guide = guide
        self._under_way: OpenLogits | None = None  # the logits of this forward
        self._drawn: list[bool] = []  # whether each token of the draft under judgement is a draw of the draft's logits
        self._kept: AllowedToken | None = None
        self._decided: list[tuple[int, float]] = []
        super().__init__(request, eos_token_ids=eos_token_ids, vocab=vocab)

    def open_logits(self, logits: list[Tensor]) -> OpenLogits:
        opened = super().open_logits(logits)
        self._under_way = replace(opened, draft=None, position_P=opened.position_P[: len(opened.logits_PV)])
        return self._under_way

    def decide(self, guide: Guide, guesses: Guesses, search: Search) -> list[tuple[int, float]]:
        """The tokens that this forward drafts or decides, and their probabilities."""
        phase = self.phase
        if phase == "draft":
            self._drawn = [False] * len(guesses.token_P)
            return guide.draft(len(guesses.token_P), self._pick_draft)
        spans = [span for _, span in self._spans()]
        drafted = [token for block, span in self._spans() for token in block.draft[span.start : span.stop]]
        drafted_PV = torch.cat([span.logits_PV for span in spans]) if self._request.sampling.draws and spans else None
        decided: list[tuple[int, float]] = []
        for place in range(len(guesses.token_P)):
            if guide.ended and not guide.pending:
                break

            def pick(_first: int, allowed_V: np.ndarray, place: int = place) -> AllowedToken:
                choice, self._kept = self._kept, None
                if choice is None and drafted_PV is not None and self._drawn[place]:
                    choice = self._judged(place, drafted[place], drafted_PV[place], allowed_V)
                self._kept = choice or self._pick(place, allowed_V)
                return self._kept

            taken = guide.next_token(pick, search)
            decided += taken
            if not taken:  # the guide waits
                break
            self._kept = None
            if drafted and taken[0][0] != drafted[place]:
                break
        return decided

    def accept_decided(self, opened: OpenLogits, guesses: Guesses, decided: list[tuple[int, float]]) -> CanvasUpdate:
        """The update of a forward whose tokens the guide has `decided`."""
        self._under_way, self._decided = None, decided
        if self.phase == "store" and self._decoding.carry and not decided:  # the guide waits
            self.num_forwards += 1
            return self._update(self.num_stored, 0, 0.0)
        if self.phase != "judge":
            guesses = _replaced(guesses, decided)
        return self.accept(opened, guesses)

    def _pick_draft(self, place: int, allowed_V: np.ndarray) -> AllowedToken:
        self._drawn[place] = True
        return self._pick(place, allowed_V)

    def _pick(self, place: int, allowed_V: np.ndarray) -> AllowedToken:
        """The likeliest allowed token at a place of this forward's logits, or a drawn token."""
        logits_1V, draw = self._allowed_logits(place, allowed_V)
        token_P, probability_P = choose(logits_1V, self._vocab, draw if self._request.sampling.draws else None)
        return AllowedToken(int(token_P[0]), float(probability_P[0]), overruled=False)

    def _judged(self, place: int, token: int, drafted_V: Tensor, allowed_V: np.ndarray) -> AllowedToken:
        """The drafted token at a place, if it is accepted, or the token that replaces it."""
        logits_1V, draw = self._allowed_logits(place, allowed_V)
        token_1 = torch.tensor([token], device=logits_1V.device)
        draft = Draft(token_1, allowed_alone(drafted_V, allowed_V)[None], self._rule, self._noise)
        tokens, probabilities, accepted = judge(logits_1V, draft, draw, self._vocab, greedy=False).tolist()
        at = 0 if accepted[0] else 1
        return AllowedToken(int(tokens[at]), float(probabilities[at]), overruled=False)

    def _allowed_logits(self, place: int, allowed_V: np.ndarray) -> tuple[Tensor, Draw]:
        """The logits (1, V) of the allowed tokens at a place of this forward, and the place's noise."""
        assert self._under_way is not None
        logits_V = self._under_way.logits_PV[place]
        position_1 = self._under_way.position_P[place : place + 1].to(logits_V.device)
        draw = noise_source(position_1, self._request.sampling, self._under_way.forward)
        return allowed_alone(logits_V, allowed_V)[None], draw

    def _take_judgements(self, spans: dict[VerifiedBlock, Span], guesses: Guesses) -> dict[VerifiedBlock, int]:
        confirmed, left = {}, self._decided
        for block, span in spans.items():
            taken, left = left[: span.length], left[span.length :]
            drafted, block.span = block.draft[span.start : span.stop], None
            confirmed[block] = sum(token == draft for (token, _), draft in zip(taken, drafted, strict=False))
            for i, (token, probability) in enumerate(taken):
                block.fill(span.start + i, token, math.log(max(probability, LEAST)), step=self.num_forwards)
            self._settle(block)
        self._take_forced()
        return confirmed

    def _activate(self, seed: list[int], log_probs: list[float]) -> None:
        super()._activate(seed, log_probs)
        if self._take_forced() and self.num_forwards:
            self._mark_final()

    def _take_forced(self) -> bool:
        """Puts forced tokens into the first masks. Returns whether there were any."""
        pending = list(self._guide.pending)
        for block in self._blocks:
            while block.open and pending:
                block.fill(block.open[0], pending.pop(0), 0.0, step=self.num_forwards)
            self._settle(block)
        is_any = len(pending) < len(self._guide.pending)
        self._guide.pending = pending
        return is_any


def _replaced(guesses: Guesses, decided: list[tuple[int, float]]) -> Guesses:
    """The guesses, the first of them replaced by the decided tokens and their probabilities."""
    token_P, confidence_P = guesses.token_P.copy(), guesses.confidence_P.copy()
    for place, (token, probability) in enumerate(decided):
        token_P[place], confidence_P[place] = token, probability
    return replace(guesses, token_P=token_P, confidence_P=confidence_P)
