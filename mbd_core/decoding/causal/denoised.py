"""Block by block: rows without order fill a block's masks unstored, then a row stores the block (`dlm`).

    denoise  [seed, mask, mask, ...]   no order -> the masks' tokens, by confidence
    store    [seed, t1, t2, ...]       causal   -> the last row gives the next block's seed

The blocks begin at the prompt's end. The first seed comes from the causal row of the prompt's last token. A block with
an EOS and no mask before it is stored as it is. With `context="full"` prompt and blocks are stored without order, and
there are no seeds.
"""

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.canvas.lane import Lane
from mbd_core.decoding.canvas.plan import CanvasPlan, CanvasUpdate, Guesses, OpenLogits, Query
from mbd_core.decoding.canvas.unmasking import accept_best
from mbd_core.decoding.causal.prefix import PrefixDecoder, guessed


class BlockDecoder(PrefixDecoder):
    """Diffusion decoding of one block after another (`dlm`)."""

    def __init__(self, request: Request, *, eos_token_ids: tuple[int, ...], vocab: Vocab) -> None:
        super().__init__(request, eos_token_ids=eos_token_ids, vocab=vocab)
        assert request.decoding.causal is not None
        self._causal = request.decoding.causal
        self._has_seeds = self._causal.context == "causal"
        # the first row after committed tokens repeats the last row of the forward that stored them, and its noise
        self._num_repeated = int(self._has_seeds and bool(request.committed))
        self._block: Lane | None = None  # `None` before the first seed
        if not self._has_seeds:
            self._begin_block([], [])

    def plan(self) -> CanvasPlan:
        start, open_at = self.num_stored, self._open
        tokens = torch.tensor(self._all[start:] if self._block is None else self._block.tokens)
        stop = start + len(tokens)
        is_last = stop >= self._end
        logits_at = torch.from_numpy(open_at + start)
        if not len(open_at):
            logits_at = torch.tensor([stop - 1] if self._has_seeds and not is_last else [], dtype=torch.int64)
        causal = self._has_seeds and not len(open_at)
        return CanvasPlan([], [Query(0, start, stop, tokens, logits_at, num_keys=stop, causal=causal)])

    def open_logits(self, logits: list[Tensor]) -> OpenLogits:
        (query,) = self.plan().queries
        known = self._all
        if self._block is not None:
            known = [*self._all[: query.start], *self._block.tokens[~self._block.masked].tolist()]
        positions = (query.logits_at + query.causal).tolist()
        forward = max(0, self._request.first_forward + self.num_forwards - self._num_repeated)
        return self._opened(logits[0], positions, lambda _: known, forward=forward)

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate:
        open_at, start = self._open, self.num_stored
        self.num_forwards += 1
        if not len(open_at):
            self._store(*guessed(guesses))
            return self._update(start, 0, 0.0)
        assert self._block is not None
        accepted_P = accept_best(guesses.score_P, 1)
        if self._causal.tau is not None:
            accepted_P |= guesses.confidence_P >= self._causal.tau
        tokens = guesses.select(accepted_P)
        _, log_probs = guessed(tokens)
        at = tokens.position_P - self.num_stored
        self._block.fill(at, tokens.token_P, np.array(log_probs), step=self.num_forwards)
        return self._update(start, len(at), len(open_at) / len(self._block.tokens))

    @property
    def _open(self) -> np.ndarray:
        """The offsets of the block's masks; none if an EOS precedes the first mask."""
        if self._block is None:
            return np.zeros(0, dtype=np.int64)
        open_at = self._block.open_positions(0, len(self._block.tokens))
        if len(open_at) and self._block.find(self._ends, 0, int(open_at[0])) is not None:
            return open_at[:0]
        return open_at

    def _store(self, seed: list[int], log_probs: list[float]) -> None:
        """Notes that the block is stored. The next block begins with `seed`, if there is a seed."""
        if self._block is not None:
            new = slice(len(self._all) - self.num_stored, self._block.first_mask(0))
            lists = (self._block.tokens, self._block.log_probs, self._block.steps)
            stop = self.num_stored + len(self._block.tokens)
            self._append(*(values[new].tolist() for values in lists), num_stored=stop)
        else:
            self.num_stored = len(self._all)
        if not self.done:
            self._begin_block(seed, log_probs)

    def _begin_block(self, seed: list[int], log_probs: list[float]) -> None:
        """Begins a block: known tokens that are not stored, the seed, and masks."""
        known = [*self._all[self.num_stored :], *seed]
        length = min(self._row_length, self._end - self.num_stored)
        self._block = Lane.fresh(tuple(known), length - len(known), self._vocab.mask_token_id)
        if seed:
            at = np.array([len(known) - 1])
            self._block.fill(at, np.array(seed), np.array(log_probs), step=self.num_forwards)
        thinking, number = self._causal.thinking, self.num_stored - self._start
        if thinking is None or number + length <= thinking.budget or thinking.end_token_id in self.tokens:
            return
        at, end = np.array([max(0, thinking.budget - number)]), np.array([thinking.end_token_id])
        self._block.fill(at, end, np.zeros(1), step=self.num_forwards)
