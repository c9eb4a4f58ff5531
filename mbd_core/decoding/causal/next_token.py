"""Token by token: the last token's causal row gives the next token; one causal row verifies a whole draft.

    plain   [next]                       causal   -> the token after it
    draft   [next, mask, mask, ...]      no order -> the masks' tokens, in one forward or, with `tau`, in several
    verify  [next, d1, d2, ...]          causal   -> row i predicts position i + 1

With `ahead` (TiDAR) the forward that verifies also drafts what follows, once after each token that may be the last
accepted one. The mask right after that token stands for the next token, which the forward itself gives:

    verify  [next, d1, d2]       causal
    draft   [M, M, M]            at the positions after next, again after d1, again after d2; no order

A draft counts as far as the row before each token predicts that token. The first prediction that differs counts too,
and is the next token. The next row overwrites everything after it. A token is a function of the tokens before it and
of the noise of its position alone. So drafts change no token, only the number of forwards. The exception is
`thinking`, whose end is put in between two drafts.

While a request has no block in the engine's budget, or drafts gain nothing (`hold_to`), it decodes plainly.

Under a grammar (`ar` alone) the logits of tokens that are not allowed are taken out. The answer's guide then takes in
the choice (`decide`), and may replace it.
"""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab, allowed_alone
from mbd_core.decoding.canvas.plan import CanvasPlan, CanvasUpdate, Guesses, OpenLogits, Query
from mbd_core.decoding.canvas.unmasking import accept_best
from mbd_core.decoding.causal.prefix import LEAST, PrefixDecoder, guessed
from mbd_core.decoding.grammar.closings import Search
from mbd_core.decoding.grammar.guide import AllowedToken, Guide, GuideState

RowKind = Literal["plain", "draft", "verify"]


class TokenDecoder(PrefixDecoder):
    """Autoregressive decoding (`ar`) and linear self-speculation (`linear_spec`)."""

    def __init__(
        self, request: Request, *, eos_token_ids: tuple[int, ...], vocab: Vocab, guide: GuideState | None = None
    ) -> None:
        super().__init__(request, eos_token_ids=eos_token_ids, vocab=vocab)
        assert request.decoding.causal is not None
        self._guide = guide
        self._causal = request.decoding.causal
        self._row_length = self._causal.row_length(request.decoding.block_size)
        self._drafts = self._causal.method == "linear_spec" and self._row_length > 1
        self._ahead = self._drafts and self._causal.ahead
        # a request that thinks has other tokens without drafts; a request with a threshold has unfinished
        # drafts, which holding would lose
        is_free = self._drafts and self._causal.thinking is None and self._causal.tau is None
        together = 1 + self._row_length if self._ahead else 1  # rows of a forward that drafts
        self.draft_length = self._row_length * together if is_free else 1
        self._is_held = False
        self._may_begin = False  # the next token is known, and a draft may follow it
        self._block: list[int] = []  # the draft: the next token, drafted tokens after it, and masks
        self._open: list[int] = []  # the offsets of its masks

    def hold_to(self, num_blocks: int) -> None:
        self._is_held = num_blocks < 1

    def plan(self) -> CanvasPlan:
        if self._may_begin and not self._is_held and not self._block:
            self._begin_draft()  # a draft without masks is verified at once
        self._planned_row = row = self._row()
        return CanvasPlan([], [row, *(ahead for ahead in self._rows_ahead(row) if ahead is not None)])

    def _row(self) -> Query:
        """The row that drafts, or the causal row."""
        kind, start = self._kind(), self.num_stored
        block = self._all[start:] if kind == "plain" else self._block
        offsets = self._open if kind == "draft" else range(len(block))
        return Query(
            0,
            start,
            start + len(block),
            torch.tensor(block),
            torch.tensor([start + offset for offset in offsets]),
            num_keys=start + len(block),
            causal=kind != "draft",
            drafts=kind == "draft",
        )

    def open_logits(self, logits: list[Tensor]) -> OpenLogits:
        kind, start = self._kind(), self.num_stored
        if kind == "draft":
            return self._opened(logits[0], [start + offset for offset in self._open], lambda _: self._all, forward=0)
        tokens = self._all if kind == "plain" else [*self._all[:start], *self._block]
        predicted = [*range(start + 1, len(tokens) + 1)]
        for row in self._rows_ahead(self._planned_row):
            predicted += [] if row is None else (row.logits_at - row.gap).tolist()
        logits_PV = torch.cat(logits)
        guide = self._guide
        if isinstance(guide, Guide) and not guide.pending and (allowed_V := guide.allowed()) is not None:
            logits_PV = allowed_alone(logits_PV, allowed_V)
        return self._opened(logits_PV, predicted, lambda position: tokens[:position], forward=0)

    def decide(self, guide: Guide, guesses: Guesses, search: Search) -> list[tuple[int, float]]:
        """The next token and its probability, which the guide takes in; nothing while it waits."""
        choice = AllowedToken(int(guesses.token_P[-1]), float(guesses.confidence_P[-1]), overruled=False)
        return guide.next_token(lambda _place, _allowed_V: choice, search)

    def accept_decided(self, opened: OpenLogits, guesses: Guesses, decided: list[tuple[int, float]]) -> CanvasUpdate:
        """The update of a forward whose tokens the guide has `decided`."""
        start, number = self.num_stored, len(decided)
        self.num_forwards += 1
        log_probs = [math.log(max(probability, LEAST)) for _, probability in decided]
        tokens, steps = [token for token, _ in decided], [self.num_forwards] * number
        self._append(tokens, log_probs, steps, num_stored=start + number)
        return self._update(start, number, 0.0)

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate:
        kind, start, number = self._kind(), self.num_stored, len(self._all)
        self.num_forwards += 1
        if kind == "draft":
            mask_ratio = len(self._open) / self._row_length
            self._fill(guesses)
            return self._update(start, 0, mask_ratio)
        row, drafted = self._planned_row, [] if kind == "plain" else self._block[1:]
        ahead, length = self._rows_ahead(row), row.stop - row.start
        confirmed = self._verify(*guessed(guesses.select(slice(0, length))), drafted=drafted)
        if ahead and not self.done:
            self._take_ahead(guesses, ahead, confirmed, start=length)
        return replace(self._update(start, len(self._all) - number, 0.0), drafted=len(drafted), confirmed=confirmed)

    def _kind(self) -> RowKind:
        """The kind of the next forward. A finished draft is always verified; an unfinished draft of a held request is
        dropped."""
        if self._block and not self._open:
            return "verify"
        return "plain" if self._is_held or not self._may_begin else "draft"

    def _rows_ahead(self, row: Query) -> list[Query | None]:
        """The drafts after each token of a causal row that may be the last accepted one; of a plain row, after its
        last token. `None` for a draft without room in the answer."""
        if not self._ahead or self._is_held or not row.causal:
            return []
        rows: list[Query | None] = []
        place = row.stop
        outcomes = range(row.start + 1, row.stop + 1) if self._kind() == "verify" else [row.stop]
        for first in outcomes:
            length = min(self._row_length, self._end - first)
            if length < 2:
                rows.append(None)
                continue
            rows.append(
                Query(
                    0,
                    place,
                    place + length,
                    torch.full((length,), self._vocab.mask_token_id),
                    torch.arange(place + 1, place + length),
                    num_keys=place + length,
                    gap=place - first,
                    drafts=True,
                )
            )
            place += length
        return rows

    def _take_ahead(self, guesses: Guesses, rows: list[Query | None], outcome: int, *, start: int) -> None:
        """The next draft: the next token, and the tokens that were drafted after it for this outcome."""
        row = rows[outcome]
        if row is None:
            return
        start += sum(len(other.logits_at) for other in rows[:outcome] if other is not None)
        drafted = guesses.token_P[start : start + len(row.logits_at)].tolist()
        self._block = [*self._all[self.num_stored :], *drafted]

    def _fill(self, guesses: Guesses) -> None:
        """Fill masks of the draft."""
        tau = self._causal.tau
        accepted_P = np.ones(len(guesses.token_P), dtype=bool)
        if tau is not None:
            accepted_P = (guesses.confidence_P >= tau) | accept_best(guesses.score_P, 1)
        for offset, token, accepted in zip(
            list(self._open), guesses.token_P.tolist(), accepted_P.tolist(), strict=True
        ):
            if accepted:
                self._block[offset] = token
                self._open.remove(offset)

    def _verify(self, tokens: list[int], log_probs: list[float], *, drafted: list[int]) -> int:
        """Takes the first predictions that equal the draft, and one more. Returns the number of equal predictions."""
        if (forced := self._forced()) is not None:
            tokens[0], log_probs[0] = forced, 0.0
        number = 1
        while number <= len(drafted) and tokens[number - 1] == drafted[number - 1]:
            number += 1
        steps = [self.num_forwards] * number
        self._append(tokens[:number], log_probs[:number], steps, num_stored=self.num_stored + number)
        self._block, self._open = [], []
        self._may_begin = self._drafts
        return number - 1

    def _begin_draft(self) -> None:
        """Begins a draft: the next token, a forced token if one is due, and masks."""
        known = [*self._all[self.num_stored :], *([] if (forced := self._forced()) is None else [forced])]
        self._block = [*known, *[self._vocab.mask_token_id] * (self._row_length - len(known))]
        self._open = list(range(len(known), self._row_length))

    def _forced(self) -> int | None:
        """The token that ends the thinking, if it must come next."""
        thinking, number = self._causal.thinking, len(self._all) - self._start
        if thinking is None or number < thinking.budget + (self._causal.method == "linear_spec"):
            return None
        return None if thinking.end_token_id in self.tokens else thinking.end_token_id
