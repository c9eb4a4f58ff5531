"""d3LLM: several blocks of a canvas at once, accepted by entropy, with a delayed cache.

    prompt | block | block | block |  masks: blocks that are not yet added
    committed -----^                ^end of the added blocks: only positions before it may be filled

A block is added when its predecessor has enough tokens, and becomes active when its predecessor is nearly done. Every
forward computes the whole canvas, or its rest after a committed prefix. A done block is committed some forwards later,
when its tokens have settled. The forward that commits a block computes its final keys.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.canvas_config import MultiBlock
from mbd_core.decoding.canvas.lane import Lane
from mbd_core.decoding.canvas.plan import CanvasPlan, CanvasTask, CanvasUpdate, Guesses, OpenLogits
from mbd_core.decoding.canvas.unmasking import GuessingDecoder, LaneAdjustments


@dataclass
class CanvasBlock:
    """Positions [start, stop) of the canvas. The first block is the prompt.

    active   of the active blocks with a mask, the first one gets a token in every forward
    done_at  number of the first forward before which the block had no mask
    """

    start: int
    stop: int
    active: bool = False
    done_at: int | None = None
    cached: bool = False


class MultiBlockCanvas(GuessingDecoder):
    """One trajectory over several blocks, on one lane."""

    num_lanes = 1

    def __init__(self, task: CanvasTask) -> None:
        assert task.canvas.multi_block is not None
        self.settings: MultiBlock = task.canvas.multi_block
        self.prompt_length, self.length = len(task.prompt), len(task.prompt) + task.max_tokens
        self.num_forwards = 0
        self.done = False
        self._forbids_eos = task.canvas.forbid_eos
        self._sampling, self._vocab, self._eos, self._ends = task.sampling, task.vocab, task.eos_token_ids, task.ends
        self._adjustments = LaneAdjustments(task)
        self._shift = int(task.shift)
        self._rule = self.settings.rule or ("dream" if task.shift else "llada")
        self._lane = Lane.fresh(task.prompt, task.max_tokens, task.vocab.mask_token_id)
        self._size = task.canvas.block_length or task.max_tokens
        self._blocks = [CanvasBlock(0, self.prompt_length, active=True, done_at=0)]
        self._num_committed = 0  # the keys of the positions before it are final
        self._add_block()
        self._prepare()

    def answer_from(self, number: int) -> Piece:
        return self._lane.answer(self.prompt_length + number, self._ends)

    def plan(self) -> CanvasPlan:
        """The next forward: the canvas from `_begin` on, with logits for the masks of all added blocks."""
        assert not self.done
        positions = self._open_positions()
        logits_at = np.maximum(positions - 1, 0) if self._shift else positions
        return CanvasPlan([], [self._lane.query(0, self._begin, self.length, logits_at)])

    def open_logits(self, logits: list[Tensor]) -> OpenLogits:
        (logits_PV,) = logits
        if self._forbids_eos:
            logits_PV[:, list(self._eos)] = -torch.inf
        positions_P = torch.from_numpy(self._open_positions())
        return OpenLogits(
            logits_PV=logits_PV,
            position_P=positions_P,
            forward=self.num_forwards,
            score="neg_entropy",
            sampling=self._sampling,
            vocab=self._vocab,
            adjust=self._adjustments.at(self._lane, positions_P, logits_PV),
        )

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate:
        accepted = self._accept(guesses)
        tokens = guesses.select(accepted)
        counts, ratios = {}, {}
        for number, block in enumerate(self._blocks[1:]):
            is_inside = (tokens.position_P >= block.start) & (tokens.position_P < block.stop)
            num_open = self._num_open(block)
            if num_open:
                counts[0, number], ratios[0, number] = int(is_inside.sum()), num_open / (block.stop - block.start)
        self.num_forwards += 1
        self._lane.fill(tokens.position_P, tokens.token_P, tokens.log_prob_P, step=self.num_forwards)
        self._prepare()
        return CanvasUpdate(counts, ratios)

    def _open_positions(self) -> np.ndarray:
        """The masked positions that this forward may fill, in all added blocks, active or not."""
        return self._lane.open_positions(self.prompt_length, self._end)

    def _num_open(self, block: CanvasBlock) -> int:
        return int(self._lane.masked[block.start : block.stop].sum())

    def _progress(self, block: CanvasBlock) -> float:
        return 1.0 - self._num_open(block) / (block.stop - block.start)

    def _accept(self, guesses: Guesses) -> np.ndarray:
        """The open positions (P,) of low entropy, which become tokens.

        LLaDA's rule always adds the position of lowest entropy. If the first active block with a mask got no token,
        its position of lowest entropy is added.
        """
        entropy_P = -guesses.score_P
        if self._rule == "llada":
            accepted_P = entropy_P <= self.settings.tau_entropy
            accepted_P[entropy_P.argmin()] = True
        else:
            accepted_P = entropy_P < self.settings.tau_entropy
        first = next((b for b in self._blocks if b.active and self._num_open(b)), None)
        if first is not None:
            inside_P = (guesses.position_P >= first.start) & (guesses.position_P < first.stop)
            if not (accepted_P & inside_P).any():
                accepted_P[np.where(inside_P, entropy_P, np.inf).argmin()] = True
        return accepted_P

    def _prepare(self) -> None:
        """Prepare the next forward: close the answer after its end, activate and add blocks, commit done blocks."""
        end = self._lane.find(self._ends, self.prompt_length, self.length)
        if end is not None:
            self._close_after(end)
        if not bool(self._lane.masked.any()):
            self.done = True
            return
        for previous, block in zip(self._blocks, self._blocks[1:], strict=False):
            block.active = block.active or self._progress(previous) >= self.settings.tau_active
        last = self._blocks[-1]
        if end is None and last.stop < self.length and self._progress(last) >= self.settings.tau_add:
            self._add_block()
        self._end = max(b.stop for b in self._blocks[1:] if b.active or self._num_open(b))
        self._begin = self._commit_done()

    def _add_block(self) -> None:
        last = self._blocks[-1]
        active = self._progress(last) >= self.settings.tau_active
        self._blocks.append(CanvasBlock(last.stop, min(last.stop + self._size, self.length), active=active))

    def _close_after(self, end: int) -> None:
        """Fill the positions after the first end with its token, so that none of them is decoded. Their step is 0."""
        positions = np.arange(end + 1, self.length)
        tokens = np.full_like(positions, int(self._lane.tokens[end]))
        self._lane.fill(positions, tokens, np.zeros(len(positions)), step=0)

    def _commit_done(self) -> int:
        """Commits the blocks that have been done long enough. Returns the first position of the next forward.

        The forward that commits a block computes it once more. The whole canvas is computed while a block is done but
        not committed, and every `refresh` forwards.
        """
        delay, forward, num_committed = self.settings.cache_delay, self.num_forwards + 1, self._num_committed
        if delay is None:
            return 0
        waits = False
        for block in self._blocks:
            if block.stop <= num_committed or block.cached:
                continue
            if self._num_open(block):
                break
            if block.done_at is None:
                block.done_at = forward
            if forward - block.done_at < delay:
                waits = True
                if self._rule == "llada":
                    break
                continue
            block.cached = True
            self._num_committed = max(self._num_committed, block.stop)
        if self._num_committed > num_committed:
            return self._with_predictor(num_committed)
        refreshes = self.settings.refresh is not None and forward % self.settings.refresh == 0
        return 0 if waits or refreshes else self._with_predictor(num_committed)

    def _with_predictor(self, start: int) -> int:
        """`start`, or with shifted logits the position before it, if that position predicts a mask."""
        return start - 1 if self._shift and start and bool(self._lane.masked[start]) else start
