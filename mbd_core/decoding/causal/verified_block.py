"""One block of an answer whose drafts are verified: its tokens, its masks, and the draft that awaits a judgement."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mbd_core.decoding.answers.slots import DraftVerdict, FrameSlot, PlannedSlot, SlotState
from mbd_core.decoding.blocks.config import T2T
from mbd_core.decoding.canvas.plan import Guesses
from mbd_core.decoding.causal.prefix import guessed


@dataclass(frozen=True)
class Span:
    """The part of a draft that is judged next: offsets [start, stop) of the block, and the draft of all its masks.

    logits_PV  the logits that gave the span's tokens
    quota      the least number of the block's masks that this draft must fill
    """

    start: int
    stop: int
    guesses: Guesses
    logits_PV: Tensor
    quota: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class VerifiedBlock:
    """A resident block from position `start` on.

    tokens    with the mask token where it is masked; offsets [first, stop) are the answer's
    steps     the forward of the answer that wrote each token
    open      ascending offsets of the masks
    draft     the last draft: a token for every mask; the other offsets have their tokens
    span      the part of the draft that is judged next
    is_settled  whether no token changes any more
    is_final    whether the blocks before it are settled too, so that the next draft's forward stores it
    """

    def __init__(
        self,
        start: int,
        known: Sequence[int],
        *,
        first: int,
        stop: int,
        log_probs: Sequence[float],
        size: int,
        mask: int,
        num_forwards: int,
    ) -> None:
        number = len(known)
        self.start, self.first, self.stop, self._mask = start, first, stop, mask
        self.tokens = [*known, *[mask] * (size - number)]
        self.log_probs = [*[0.0] * (number - len(log_probs)), *log_probs, *[0.0] * (size - number)]
        self.steps = [num_forwards] * size
        self.open = list(range(number, stop))
        self.draft = list(self.tokens)
        self.span: Span | None = None
        self.is_settled = self.is_final = not self.open
        self.num_complete_steps = 0  # drafting forwards that found no mask in it
        self._seen_tokens, self._seen_open = list(self.tokens), list(self.open)

    @property
    def progress(self) -> float:
        """The filled share of the answer's positions."""
        total = self.stop - self.first
        return 1.0 - len(self.open) / total if total else 1.0

    def window(self, part: int | None) -> list[int]:
        """The masks that may be filled now: the masks of the leftmost group of `part` positions with a mask."""
        size = part or len(self.tokens)
        return [offset for offset in self.open if offset // size == self.open[0] // size]

    def fill(self, offset: int, token: int, log_prob: float, *, step: int) -> None:
        self.tokens[offset] = self.draft[offset] = token
        self.log_probs[offset], self.steps[offset] = log_prob, step
        self.open.remove(offset)

    def edit(self, guesses: Guesses, t2t: T2T, *, step: int) -> int:
        """Replaces filled tokens whose guess is another token above the threshold (T2T).

        `guesses` are at all of the answer's positions. Returns the number of replaced tokens.
        """
        edited = 0
        sure_P = guesses.confidence_P > t2t.tau
        offsets = range(self.first, self.stop)
        for offset, token, log_prob, is_sure in zip(offsets, *guessed(guesses), sure_P.tolist(), strict=True):
            if offset not in self.open and is_sure and token != self.tokens[offset]:
                self.tokens[offset], self.log_probs[offset], self.steps[offset] = token, log_prob, step
                edited += 1
        return edited

    def keep_draft(self, drafted: Guesses) -> None:
        """Keeps a drafted token for each mask; the other offsets keep their tokens."""
        self.draft = list(self.tokens)
        for position, token in zip(drafted.position_P.tolist(), drafted.token_P.tolist(), strict=True):
            if position - self.start in self.open:
                self.draft[position - self.start] = token

    def has_end(self, ends: Sequence[int]) -> bool:
        """Whether a token before its first mask ends the answer."""
        stop = self.open[0] if self.open else self.stop
        return any(token in ends for token in self.tokens[self.first : stop])

    def has_any_end(self, ends: Sequence[int]) -> bool:
        """Whether any of its tokens ends the answer."""
        return any(self.tokens[i] in ends for i in range(self.first, self.stop) if i not in self.open)

    # -- for traces and frames

    def look(self) -> None:
        """Keeps the tokens and masks that the next forward sees."""
        self._seen_tokens, self._seen_open = list(self.tokens), list(self.open)

    def slot(self, *, judged: Span | None, confirmed: int, stored: bool, was_final: bool) -> PlannedSlot:
        """The block after a forward that judged the span `judged` of its draft and confirmed `confirmed` tokens."""
        seen = SlotState.TO_CACHE if was_final else SlotState.ACTIVE
        number, size = len(self._seen_open), len(self.tokens)
        filled = [i for i in range(size) if i < self.stop and i not in self.open]
        return PlannedSlot(
            start=self.start,
            frame=FrameSlot(
                state=(SlotState.IN_CACHE if stored else seen).name,
                tokens=tuple(self.tokens[i] if i in filled else None for i in range(size)),
                accepted=tuple(i for i in self._seen_open if i not in self.open),
                edited=tuple(i for i in filled if i not in self._seen_open and self.tokens[i] != self._seen_tokens[i]),
                verdict=self._verdict(judged, confirmed),
            ),
            seen=seen,
            confidences=tuple(
                float(np.exp(self.log_probs[i])) if i in filled and i >= self.first else float(i in filled)
                for i in range(size)
            ),
            mask_ratio=number / size,
        )

    def _verdict(self, judged: Span | None, confirmed: int) -> DraftVerdict:
        waits = range(0) if self.span is None else range(self.span.start, self.span.stop)
        drafted = tuple(token if i in waits else None for i, token in enumerate(self.draft))
        if judged is None:
            return DraftVerdict(drafted=drafted)
        at = judged.start + confirmed
        is_refused = confirmed < judged.length and at in self._seen_open and at not in self.open
        return DraftVerdict(
            drafted=drafted,
            judged=judged.length,
            confirmed=tuple(range(judged.start, at)),
            refused=(at,) if is_refused else (),
        )
