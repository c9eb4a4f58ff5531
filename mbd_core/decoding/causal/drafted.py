"""Two sizes: a small model drafts in one or more blocks, a large one judges, and the answer is the large one's.

    known         a b c d e f g h i
    draft model         [d e f g h i] [M M M] [M M M]   tokens to store, causal; blocks -> tokens for all masks
    large model               [f g h i  x1 x2 x3 y1 y2]   tokens to store and drafts, causal -> its own x1, x2, ...

Each model has keys of its own, in the same pages. A forward of either stores the tokens that it has not stored yet, so
no forward only stores: a decided block leaves at once, and the next draft and the next judgement carry its row.
Positions that both have stored are stored for good (`num_stored`).

A large model with an autoregressive mode judges a token by the logits before it; so the last known token stays
unstored. Another large model judges at block size 1, by copies of the masks (`VerifyingDecoder`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.verification import VerifyNoise
from mbd_core.decoding.canvas.plan import CanvasPlan, CanvasUpdate, Guesses, OpenLogits, Query
from mbd_core.decoding.causal.verified import DraftRound, VerifyingDecoder, VerifyPhase
from mbd_core.decoding.causal.verified_block import Span, VerifiedBlock


@dataclass(frozen=True, kw_only=True)
class DraftPair:
    """A decoder's knowledge of the two models.

    mask_token_id   the draft model's mask
    shift           the draft model's logits predict the next position
    predicts_next   the large model judges by the logits before a position, otherwise by a mask's logits in its place
    """

    mask_token_id: int
    shift: bool
    predicts_next: bool


class DraftedDecoder(VerifyingDecoder):
    """Decoding of one request by two models; an exact answer (`Verify.exact`)."""

    def __init__(
        self,
        request: Request,
        *,
        eos_token_ids: tuple[int, ...],
        vocab: Vocab,
        pair: DraftPair,
        noise: VerifyNoise | None = None,
    ) -> None:
        """`vocab` is the large model's."""
        self._pair = pair
        super().__init__(request, eos_token_ids=eos_token_ids, vocab=vocab, noise=noise)
        self._stored_by_draft = self._stored_by_judge = self.num_stored

    def plan(self) -> CanvasPlan:
        return self._judgement() if self.phase == "judge" else CanvasPlan([], self._draft_rows())

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate:
        phase, front, spans = self.phase, self._front, dict(self._spans())
        update = super().accept(opened, guesses)
        if phase == "draft":
            self._stored_by_draft = max(0, front - self._pair.shift)
        else:
            first = next(block.start + span.start for block, span in spans.items())
            is_last_known = self._pair.predicts_next and update.confirmed == update.drafted
            self._stored_by_judge = first + update.confirmed - is_last_known
        self.num_stored = min(self._stored_by_draft, self._stored_by_judge, len(self._all))
        return update

    def forget_keys(self) -> None:
        """The keys past `num_stored` are lost, in both models. A draft that was not judged yet is drafted anew."""
        self._stored_by_draft = self._stored_by_judge = self.num_stored
        for block in self._blocks:
            block.span = None

    @property
    def _front(self) -> int:
        return len(self._all) // self._size * self._size

    @property
    def _mask_token_id(self) -> int:
        return self._pair.mask_token_id

    def _round(self, masks: tuple[int, ...], stop: int) -> DraftRound:
        copies = 0 if self._pair.predicts_next else sum(masks)
        return DraftRound(
            masks=masks,
            num_drafted=stop - self._stored_by_draft,
            num_judged=min(stop, self._end) - self._stored_by_judge + copies,
            by_draft_model=True,
        )

    def _draft_rows(self) -> list[Query]:
        """Known tokens that the draft model has not stored, in order; then each block without order."""
        start, shift = self._stored_by_draft, int(self._pair.shift)
        text = [*self._all[start : self._front], *(token for block in self._blocks for token in block.tokens)]
        ends = [(self._front, True)]
        for block in self._blocks:
            lead = block.open[0] if self._rule.lead == "causal" else 0
            ends += [(block.start + lead, True), (block.start + self._size, False)]
        masks = [block.start + offset for block in self._blocks for offset in block.open]
        asked = torch.tensor(masks, dtype=torch.int64) - shift
        rows, begin = [], start
        for stop, causal in ends:
            if stop == begin:
                continue
            at = asked[(asked >= begin) & (asked < stop)]
            tokens = torch.tensor(text[begin - start : stop - start])
            rows.append(Query(0, begin, stop, tokens, at, num_keys=stop, causal=causal, by_draft_model=True))
            begin = stop
        return rows

    def _judgement(self) -> CanvasPlan:
        spans = list(self._spans())
        last, shift = spans[-1][0], int(self._pair.predicts_next)
        start, stop = self._stored_by_judge, last.start + spans[-1][1].stop
        begin = min(start, self._front)
        text = [*self._all[begin : self._front], *(token for block in self._blocks for token in block.draft)]
        at = torch.tensor(self.judged_positions if shift else [], dtype=torch.int64) - shift
        row = Query(0, start, stop, torch.tensor(text[start - begin : stop - begin]), at, num_keys=stop, causal=True)
        gap = last.start + self._size - self._front
        return CanvasPlan([], [row] if shift else [row, *(self._copy(*pair, gap=gap) for pair in spans)])

    def _number_stored(
        self,
        finals: Sequence[bool],
        spans: dict[VerifiedBlock, Span],
        confirmed: dict[VerifiedBlock, int],
        phase: VerifyPhase,
    ) -> int:
        """The number of leading blocks that are decided; they leave."""
        return next((n for n, block in enumerate(self._blocks) if block.open), len(self._blocks))
