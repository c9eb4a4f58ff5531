"""The common part of decoders after a stored prefix: the tokens, the number of stored tokens, changes of logits.

    prompt | answer ........ | row
    ^ stored ............ ^    ^ begins at `num_stored`: known tokens that are not stored, then new positions

Shape legend: P positions with logits, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.adjustments import Adjust, Adjustments
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.canvas.plan import CanvasUpdate, Guesses, OpenLogits
from mbd_core.decoding.canvas.unmasking import GuessingDecoder


class PrefixDecoder(GuessingDecoder):
    """The part of a `PlannedDecoder` that does not depend on the method."""

    num_lanes = 1

    def __init__(self, request: Request, *, eos_token_ids: tuple[int, ...], vocab: Vocab) -> None:
        planned = request.decoding.planned
        assert planned is not None
        self._request, self._vocab = request, vocab
        self._start = len(request.prompt)
        self._end = self._start + request.max_tokens
        self.length = self._end + planned.overhang
        self.num_stored = request.first_block_start(self._start + len(request.committed))
        self.num_forwards = 0
        self.done = False
        self._row_length = planned.longest
        self._all = [*request.prompt, *request.committed]
        self._log_probs = [0.0] * len(request.committed)
        self._steps = [0] * len(request.committed)
        self._ends = request.ends(eos_token_ids)
        self._adjustments = PrefixAdjustments(request, self._ends, planned.longest) if request.adjusts else None

    def answer_from(self, number: int) -> Piece:
        return Piece(
            tokens=tuple(self._all[self._start + number :]),
            logprobs=tuple(self._log_probs[number:]),
            steps=tuple(self._steps[number:]),
        )

    def _append(
        self, tokens: Sequence[int], log_probs: Sequence[float], steps: Sequence[int], *, num_stored: int
    ) -> None:
        """Adds tokens and their forwards' numbers to the answer, up to an ending token and within its budget.

        `num_stored` positions are stored now, as far as they hold tokens.
        """
        room = self._end - len(self._all)
        ends = (index + 1 for index, token in enumerate(tokens[:room]) if token in self._ends)
        number = next(ends, None)
        self.done = number is not None or len(tokens) >= room
        tokens = tokens[: room if number is None else number]
        self._all += tokens
        self._log_probs += log_probs[: len(tokens)]
        self._steps += steps[: len(tokens)]
        self.num_stored = min(num_stored, len(self._all))

    def _opened(
        self, logits_PV: Tensor, positions: Sequence[int], history: Callable[[int], Sequence[int]], *, forward: int
    ) -> OpenLogits:
        """The logits that predict these positions; drawn tokens use the noise of `forward`.

        `history` gives the tokens that a position's penalties count.
        """
        adjust, position_P = None, torch.tensor(positions, dtype=torch.int64)
        if self._adjustments is not None:
            adjust = self._adjustments.at([history(position) for position in positions], position_P, logits_PV)
        return OpenLogits(
            logits_PV=logits_PV,
            position_P=position_P,
            forward=forward,
            score="confidence",
            sampling=self._request.sampling,
            vocab=self._vocab,
            adjust=adjust,
        )

    def _update(self, start: int, num_accepted: int, mask_ratio: float) -> CanvasUpdate:
        """The update of a forward whose row began at `start`."""
        block = 0, max(0, start - self._start) // self._row_length
        return CanvasUpdate({block: num_accepted}, {block: mask_ratio})


LEAST = torch.finfo(torch.float32).tiny


def guessed(guesses: Guesses) -> tuple[list[int], list[float]]:
    """The guessed tokens and their log-probabilities (`log_probability`), as numbers of the host."""
    return guesses.token_P.tolist(), [math.log(max(p, LEAST)) for p in guesses.confidence_P.tolist()]


class PrefixAdjustments:
    """A request's changes of its logits (`Adjustments`), where every position counts its own tokens.

    In a causal row these are the tokens before it, as if its tokens had been decoded one by one.
    """

    def __init__(self, request: Request, ends: tuple[int, ...], num_rows: int) -> None:
        self._request, self._ends, self._num_rows = request, ends, num_rows
        self._memory: Adjustments | None = None

    def at(self, histories: Sequence[Sequence[int]], position_P: Tensor, logits_PV: Tensor) -> Adjust:
        """The changes at these positions, each after its own history of tokens, prompt included."""
        request, start, device = self._request, len(self._request.prompt), logits_PV.device
        if self._memory is None:
            self._memory = Adjustments(
                self._num_rows,
                length=start + request.max_tokens + self._num_rows,
                vocab_size=logits_PV.shape[-1],
                num_eos=len(self._ends),
                device=device,
            )
            for row in range(self._num_rows):
                self._memory.write(
                    row,
                    request.prompt,
                    request.sampling,
                    prompt_length=start,
                    ends=self._ends,
                    free=start + request.min_tokens,
                )
        memory = self._memory.head(len(histories))
        for row, history in enumerate(histories):
            memory.history_RL[row, start : len(history)] = torch.tensor(history[start:], dtype=torch.int32)
            memory.history_RL[row, len(history) :] = logits_PV.shape[-1]
        last_R1 = torch.tensor([[len(history) - 1] for history in histories], device=device)
        return memory.at(
            torch.arange(len(histories), device=device),
            position_P.to(device),
            tokens_RS=memory.history_RL.long().gather(1, last_R1),
            masked_RS=torch.zeros_like(last_R1, dtype=torch.bool),
            positions_RS=last_R1,
        )
