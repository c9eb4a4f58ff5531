"""Decoding a canvas along one trajectory: vanilla LLaDA and Dream, Fast-dLLM, dLLM-Cache and LocalLeap.

    prompt | block | block | block        the current block is the first with a mask; only it is filled
             ^start  ^stop

Every forward computes a range of positions anew (`cache`, `refresh`) and yields logits at the current block's masks;
which of them become tokens is `canvas_accept`'s. BlockBatch, with several trajectories, is in `branches.py`.

Shape legend: P open positions, V vocabulary.
"""

import torch
from torch import Tensor

from mbd_core.canvas.branches import BranchedCanvas, distinct_lengths
from mbd_core.canvas.plan import CanvasDecoder, CanvasPlan, CanvasTask, CanvasUpdate, Lane, Query, query
from mbd_core.canvas.quota import quota, scheduled, steps_of_block, unmasking_share
from mbd_core.canvas.unmasking import Guess, best, by_chance, by_factor, drawn_places, guess, over_threshold
from mbd_core.decoding.canvas_config import Canvas
from mbd_core.decoding.sampling import Sampling, Vocab, log_probability

__all__ = [
    "CanvasDecoder",
    "CanvasPlan",
    "CanvasUpdate",
    "Query",
    "SingleCanvas",
    "canvas_decoder",
    "check_canvas",
    "num_lanes",
]


def check_canvas(canvas: Canvas, *, prompt_length: int, max_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
    """Raise `ValueError` where a request cannot be decoded as `canvas` says."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if prompt_length < 1:
        raise ValueError("the prompt is empty; give at least one token")
    if canvas.forbid_eos and not eos_token_ids:
        raise ValueError("canvas.forbid_eos=True needs EOS ids; leave it out where EOS is ignored")
    if canvas.steps is None:
        return
    if canvas.accept in ("quota", "threshold") and canvas.steps > max_tokens:
        raise ValueError(f"canvas.steps={canvas.steps} exceeds max_tokens={max_tokens}: a step fills one at least")
    num_blocks = -(-max_tokens // (canvas.block_length or max_tokens))
    for block in range(num_blocks):
        size = canvas.block_length or max_tokens
        if not steps_of_block(canvas.steps, max_tokens, block * size, min((block + 1) * size, max_tokens)):
            raise ValueError(
                f"canvas.steps={canvas.steps} leaves block {block} of {num_blocks} without a step; "
                f"raise steps or canvas.block_length={canvas.block_length}"
            )


def num_lanes(canvas: Canvas, max_tokens: int) -> int:
    """How many lanes, each with keys and values of its own, a request's decoder will have."""
    if canvas.branches is not None:
        return len(distinct_lengths(canvas.branches, max_tokens))
    return 2 if canvas.cfg_scale else 1


def canvas_decoder(
    prompt: tuple[int, ...],
    max_tokens: int,
    canvas: Canvas,
    sampling: Sampling,
    *,
    eos_token_ids: tuple[int, ...],
    vocab: Vocab,
    shift: bool,
) -> CanvasDecoder:
    """The decoder of one request.

    `eos_token_ids` empty means that EOS ends nothing; with `shift` a model's row p - 1 predicts position p. Raises
    `ValueError` where `check_canvas` does.
    """
    check_canvas(canvas, prompt_length=len(prompt), max_tokens=max_tokens, eos_token_ids=eos_token_ids)
    kind = SingleCanvas if canvas.branches is None else BranchedCanvas
    return kind(
        CanvasTask(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            canvas=canvas,
            sampling=sampling,
            eos_token_ids=eos_token_ids,
            vocab=vocab,
            shift=shift,
        )
    )


class SingleCanvas:
    """One trajectory: blocks from left to right on one lane, with guidance on a second that lacks the prompt."""

    def __init__(self, task: CanvasTask) -> None:
        canvas, prompt, max_tokens = task.canvas, task.prompt, task.max_tokens
        self.canvas, self.sampling = canvas, task.sampling
        self.prompt_length, self.max_tokens = len(prompt), max_tokens
        self.length = len(prompt) + max_tokens
        self.num_lanes = num_lanes(canvas, max_tokens)
        self.num_forwards = 0
        self.done = False
        self._vocab, self._eos = task.vocab, task.eos_token_ids
        self._shift = int(task.shift)
        self._lane = Lane.fresh(prompt, max_tokens, task.vocab.mask_token_id)
        self._block_length = canvas.block_length or max_tokens
        self._begin_block(0)

    @property
    def tokens(self) -> list[int]:
        return self._lane.tokens[self._lane.decided(self.prompt_length, self._eos)].tolist()

    @property
    def log_probs(self) -> list[float]:
        return self._lane.log_probs[self._lane.decided(self.prompt_length, self._eos)].tolist()

    def plan(self) -> CanvasPlan:
        """The next forward: the ranges to compute anew on each lane, and logits at the current block's masks."""
        assert not self.done
        rows = self._rows(self._lane.open(self._start, self._stop))
        queries = []
        for lane in range(self.num_lanes):
            canvas = self._lane if lane == 0 else self._without_prompt()
            for start, stop in self._ranges():
                queries.append(query(lane, canvas, start, stop, rows[(rows >= start) & (rows < stop)]))
        return CanvasPlan([], queries)

    def update(self, logits: list[Tensor]) -> CanvasUpdate:
        """Accept tokens from this forward's logits, a (len(logits_at), V) tensor a query."""
        per_lane = len(logits) // self.num_lanes
        logits_PV = torch.cat(logits[:per_lane])
        if self.num_lanes == 2:
            conditional_PV, unconditional_PV = logits_PV.float(), torch.cat(logits[per_lane:]).float()
            logits_PV = unconditional_PV + (self.canvas.cfg_scale + 1) * (conditional_PV - unconditional_PV)
        if self.canvas.forbid_eos:
            logits_PV[:, list(self._eos)] = -torch.inf
        positions = self._lane.open(self._start, self._stop)
        g = guess(logits_PV, positions, self.num_forwards, self.canvas, self.sampling, self._vocab)
        accepted = self._accept(g)
        mask_ratio = len(positions) / (self._stop - self._start)
        block = (self._start - self.prompt_length) // self._block_length
        self._lane.fill(positions[accepted], g.token_P[accepted], log_probability(g.confidence_P[accepted]))
        self.num_forwards += 1
        self._step += 1
        if bool(accepted.all()):
            self._finish_block(block)
        return CanvasUpdate({(0, block): int(accepted.sum())}, {(0, block): mask_ratio})

    def _begin_block(self, block: int) -> None:
        self._start = self.prompt_length + block * self._block_length
        self._stop = min(self._start + self._block_length, self.length)
        self._step = self._leftover = 0
        offset = self._start - self.prompt_length
        steps = self.canvas.steps or self.max_tokens
        self._num_steps = steps_of_block(steps, self.max_tokens, offset, self._stop - self.prompt_length)

    def _finish_block(self, block: int) -> None:
        """The blocks so far are complete: an EOS in this one ends the request, else the next one begins."""
        if self._stop == self.length or self._lane.find(self._eos, self._start, self._stop) is not None:
            self.done = True
        else:
            self._begin_block(block + 1)

    def _ranges(self) -> list[tuple[int, int]]:
        """Which positions this forward computes; a shifted model's window begins one earlier, where its row is."""
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

    def _rows(self, positions: Tensor) -> Tensor:
        return (positions - 1).clamp(min=0) if self._shift else positions

    def _without_prompt(self) -> Lane:
        lane = self._lane.copy()
        lane.tokens[: self.prompt_length] = self._vocab.mask_token_id
        return lane

    def _accept(self, g: Guess) -> Tensor:
        """Which open positions become tokens (P,)."""
        canvas, num_masked = self.canvas, len(g.position_P)
        match canvas.accept:
            case "quota":
                count = quota(self._stop - self._start, self._num_steps, self._step)
                return best(drawn_places(g, canvas, self.sampling, self.num_forwards), count)
            case "schedule":
                count = scheduled(num_masked, self._num_steps, self._step, canvas.eps)
                return best(drawn_places(g, canvas, self.sampling, self.num_forwards), count)
            case "origin":
                share = unmasking_share(self._num_steps, self._step, canvas.eps)
                return by_chance(g, share, self.sampling, self.num_forwards)
            case "factor":
                return by_factor(g, canvas.factor)
            case "threshold":
                return self._over_threshold(g)

    def _over_threshold(self, g: Guess) -> Tensor:
        chosen = over_threshold(g, self.canvas.tau, self.canvas.leap) | best(g.score_P, 1)
        if self.canvas.steps is None:
            return chosen
        room = quota(self._stop - self._start, self._num_steps, self._step) + self._leftover
        chosen &= best(g.score_P, room)
        self._leftover = room - int(chosen.sum())
        return chosen
