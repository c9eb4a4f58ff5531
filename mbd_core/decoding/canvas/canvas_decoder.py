"""The decoder of a request that fills a canvas: its limits, and decoding along one trajectory.

    prompt | block | block | block    the current block is the first with a mask; only it is filled
             ^start  ^stop

Vanilla LLaDA and Dream, Fast-dLLM, dLLM-Cache and LocalLeap have one trajectory. Every forward recomputes a range of
positions (`cache`, `refresh`) and gives logits at the current block's masks; `unmasking.py` accepts some of them as
tokens. BlockBatch, with several trajectories, is in `branches.py`; d3LLM, with several blocks at once, in
`multi_block.py`.

Shape legend: P open positions, V vocabulary.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.canvas.branches import BranchedCanvas
from mbd_core.decoding.canvas.lane import Lane, num_lanes
from mbd_core.decoding.canvas.multi_block import MultiBlockCanvas
from mbd_core.decoding.canvas.plan import (
    CanvasPlan,
    CanvasTask,
    CanvasUpdate,
    Guesses,
    OpenLogits,
    PlannedDecoder,
)
from mbd_core.decoding.canvas.unmasking import (
    GuessingDecoder,
    LaneAdjustments,
    accept_best,
    accept_by_chance,
    accept_by_factor,
    accept_over_threshold,
    noisy_scores,
    quota,
    scheduled_quota,
    steps_of_block,
    unmasking_share,
)


def check_canvas(canvas: Canvas, *, prompt_length: int, max_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
    """Raise `ValueError` if a request cannot be decoded with these settings."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if prompt_length < 1:
        raise ValueError("the prompt is empty; give at least one token")
    if canvas.forbid_eos and not eos_token_ids:
        raise ValueError("canvas.forbid_eos=True needs EOS ids; leave it out where EOS is ignored")
    if canvas.steps is None:
        return
    if _fills_every_step(canvas) and canvas.steps > max_tokens:
        raise ValueError(f"canvas.steps={canvas.steps} exceeds max_tokens={max_tokens}: each step fills a position")
    size = canvas.block_length or max_tokens
    num_blocks = -(-max_tokens // size)
    for block in range(num_blocks):
        if not steps_of_block(canvas.steps, max_tokens, block * size, min((block + 1) * size, max_tokens)):
            raise ValueError(
                f"canvas.steps={canvas.steps} leaves block {block} of {num_blocks} without a step; "
                f"raise steps or canvas.block_length={canvas.block_length}"
            )


def canvas_max_tokens(canvas: Canvas, *, preferred: int, most: int) -> int:
    """The default of `max_tokens`.

    It is `preferred`, or the nearest number up to `most` that gives every step a token and every block a step. If
    there is no such number, `check_canvas` refuses the result.
    """
    number = preferred
    if canvas.steps is not None:
        if canvas.block_length is not None:
            number = min(number, canvas.steps * canvas.block_length)  # each block takes at least one step
        if _fills_every_step(canvas):
            number = max(number, canvas.steps)
    return min(number, most)


def _fills_every_step(canvas: Canvas) -> bool:
    """Whether every step accepts at least one token, which bounds the steps by the tokens."""
    return canvas.accept in ("quota", "threshold")


def canvas_decoder(
    prompt: tuple[int, ...],
    max_tokens: int,
    canvas: Canvas,
    sampling: Sampling,
    *,
    eos_token_ids: tuple[int, ...],
    vocab: Vocab,
    shift: bool,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> PlannedDecoder:
    """The decoder of one request.

    A token of `eos_token_ids` or `stop_token_ids` ends the request. With `shift` the logits of position p - 1 predict
    position p. Raises the `ValueError` of `check_canvas`.
    """
    check_canvas(canvas, prompt_length=len(prompt), max_tokens=max_tokens, eos_token_ids=eos_token_ids)
    kind: Callable[[CanvasTask], PlannedDecoder] = SingleCanvas
    if canvas.branches is not None:
        kind = BranchedCanvas
    elif canvas.multi_block is not None:
        kind = MultiBlockCanvas
    return kind(
        CanvasTask(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            canvas=canvas,
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            vocab=vocab,
            shift=shift,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
        )
    )


class SingleCanvas(GuessingDecoder):
    """One trajectory: blocks from left to right on one lane. Guidance adds a second lane, whose prompt is masked."""

    def __init__(self, task: CanvasTask) -> None:
        canvas, prompt, max_tokens = task.canvas, task.prompt, task.max_tokens
        self.canvas, self.sampling = canvas, task.sampling
        self.prompt_length, self.max_tokens = len(prompt), max_tokens
        self.length = len(prompt) + max_tokens
        self.num_lanes = num_lanes(canvas, max_tokens)
        self.num_forwards = 0
        self.done = False
        self._vocab, self._eos, self._ends = task.vocab, task.eos_token_ids, task.ends
        self._adjustments = LaneAdjustments(task)
        self._shift = int(task.shift)
        self._lane = Lane.fresh(prompt, max_tokens, task.vocab.mask_token_id)
        self._block_length = canvas.block_length or max_tokens
        self._open_P = np.zeros(0, dtype=np.int64)  # the masks that the planned forward has logits for
        self._begin_block(0)

    def answer_from(self, number: int) -> Piece:
        return self._lane.answer(self.prompt_length + number, self._ends)

    def plan(self) -> CanvasPlan:
        """The next forward: the ranges to recompute on each lane, and logits for the current block's masks."""
        assert not self.done
        self._open_P = self._lane.open_positions(self._start, self._stop)
        logits_at = self._predictors(self._open_P)
        ranges, queries = self._ranges(), []
        for index in range(self.num_lanes):
            lane = self._lane if index == 0 else self._unconditional_lane()
            for start, stop in ranges:
                at = logits_at
                if len(ranges) > 1:
                    at = at[(at >= start) & (at < stop)]
                queries.append(lane.query(index, start, stop, at))
        return CanvasPlan([], queries)

    def open_logits(self, logits: list[Tensor]) -> OpenLogits:
        per_lane = len(logits) // self.num_lanes
        logits_PV = logits[0] if per_lane == 1 else torch.cat(logits[:per_lane])
        if self.num_lanes == 2:
            conditional_PV, unconditional_PV = logits_PV.float(), torch.cat(logits[per_lane:]).float()
            logits_PV = unconditional_PV + (self.canvas.cfg_scale + 1) * (conditional_PV - unconditional_PV)
        if self.canvas.forbid_eos:
            logits_PV = logits_PV.index_fill(1, torch.tensor(self._eos, device=logits_PV.device), -torch.inf)
        positions = torch.from_numpy(self._open_P)
        return OpenLogits(
            logits_PV=logits_PV,
            position_P=positions,
            forward=self.num_forwards,
            score=self.canvas.score,
            sampling=self.sampling,
            vocab=self._vocab,
            adjust=self._adjustments.at(self._lane, positions, logits_PV),
        )

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate:
        accepted = self._accept(guesses)
        mask_ratio = len(opened.position_P) / (self._stop - self._start)
        block = (self._start - self.prompt_length) // self._block_length
        tokens = guesses.select(accepted)
        self.num_forwards += 1
        self._lane.fill(tokens.position_P, tokens.token_P, tokens.log_prob_P, step=self.num_forwards)
        self._step += 1
        if len(tokens.position_P) == len(opened.position_P):
            self._finish_block(block)
        return CanvasUpdate({(0, block): len(tokens.position_P)}, {(0, block): mask_ratio})

    def _begin_block(self, block: int) -> None:
        self._start = self.prompt_length + block * self._block_length
        self._stop = min(self._start + self._block_length, self.length)
        self._step = self._leftover = 0
        offset = self._start - self.prompt_length
        steps = self.canvas.steps or self.max_tokens
        self._num_steps = steps_of_block(steps, self.max_tokens, offset, self._stop - self.prompt_length)

    def _finish_block(self, block: int) -> None:
        """End the request after the last block or a block with an EOS; otherwise begin the next block."""
        if self._stop == self.length or self._lane.find(self._ends, self._start, self._stop) is not None:
            self.done = True
        else:
            self._begin_block(block + 1)

    def _ranges(self) -> list[tuple[int, int]]:
        """The ranges that this forward computes. With `shift` the block's window begins one position earlier, at the
        position that predicts the block's first position."""
        window = (max(self._start - self._shift, 0), self._stop)
        refresh = self.canvas.refresh
        if refresh is None:
            if self.canvas.cache == "none" or self._step == 0:
                return [(0, self.length)]
            return [(window[0], self.length) if self.canvas.cache == "prefix" else window]
        if self.num_forwards % refresh.response_interval == 0:
            window = (self.prompt_length - self._shift, self.length)
        if self.num_forwards % refresh.prompt_interval:
            return [window]
        if window[0] <= self.prompt_length:
            return [(0, window[1])]
        return [(0, self.prompt_length), window]

    def _predictors(self, positions: np.ndarray) -> np.ndarray:
        """The positions whose logits predict `positions`."""
        return np.maximum(positions - 1, 0) if self._shift else positions

    def _unconditional_lane(self) -> Lane:
        """The canvas with its prompt masked (classifier-free guidance)."""
        lane = self._lane.copy()
        lane.tokens[: self.prompt_length] = self._vocab.mask_token_id
        return lane

    def _accept(self, guesses: Guesses) -> np.ndarray:
        """The open positions (P,) that become tokens."""
        canvas, num_masked = self.canvas, len(guesses.position_P)
        match canvas.accept:
            case "quota":
                return self._accept_number(guesses, quota(self._stop - self._start, self._num_steps, self._step))
            case "schedule":
                return self._accept_number(
                    guesses, scheduled_quota(num_masked, self._num_steps, self._step, canvas.eps)
                )
            case "origin":
                share = unmasking_share(self._num_steps, self._step, canvas.eps)
                return accept_by_chance(guesses, share, self.sampling, self.num_forwards)
            case "factor":
                return accept_by_factor(guesses, canvas.factor)
            case "threshold":
                return self._accept_by_threshold(guesses)

    def _accept_number(self, guesses: Guesses, count: int) -> np.ndarray:
        """The `count` best positions, or with `score_temperature` positions drawn by their scores."""
        return accept_best(noisy_scores(guesses, self.canvas, self.sampling, self.num_forwards), count)

    def _accept_by_threshold(self, guesses: Guesses) -> np.ndarray:
        """The positions over the threshold, at least the best. With `steps`, at most the step's quota plus
        the quota that earlier steps of the block left unused."""
        accepted = accept_over_threshold(guesses, self.canvas.tau, self.canvas.leap) | accept_best(guesses.score_P, 1)
        if self.canvas.steps is None:
            return accepted
        room = quota(self._stop - self._start, self._num_steps, self._step) + self._leftover
        accepted &= accept_best(guesses.score_P, room)
        self._leftover = room - int(accepted.sum())
        return accepted
