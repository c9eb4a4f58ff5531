"""A lane: one copy of a canvas, with its own keys and values. Guidance has two lanes, BlockBatch one for each
branch."""

from dataclasses import dataclass

import numpy as np
import torch

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas
from mbd_core.decoding.canvas.plan import Query


@dataclass
class Lane:
    """The tokens of a canvas (L,), on the host. `masked` is stored, and never computed as "token == mask id".

    log_probs  log-probability of each token in the forward that accepted it
    steps      number of this forward
    """

    tokens: np.ndarray
    masked: np.ndarray
    log_probs: np.ndarray
    steps: np.ndarray

    @classmethod
    def fresh(cls, prompt: tuple[int, ...], max_tokens: int, mask_token_id: int) -> "Lane":
        """The prompt, followed by `max_tokens` masks."""
        tokens = np.array([*prompt, *[mask_token_id] * max_tokens], dtype=np.int64)
        return cls(tokens, np.arange(len(tokens)) >= len(prompt), np.zeros(len(tokens)), np.zeros_like(tokens))

    def copy(self) -> "Lane":
        return Lane(self.tokens.copy(), self.masked.copy(), self.log_probs.copy(), self.steps.copy())

    def open_positions(self, start: int, stop: int) -> np.ndarray:
        """Masked positions in [start, stop), ascending."""
        return self.masked[start:stop].nonzero()[0] + start

    def fill(self, at: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray, *, step: int) -> None:
        self.tokens[at] = tokens
        self.log_probs[at] = log_probs
        self.steps[at] = step
        self.masked[at] = False

    def first_mask(self, start: int) -> int:
        """The first masked position from `start` on; the canvas's length if there is none."""
        masked = self.masked[start:]
        return start + int(masked.argmax()) if masked.any() else len(self.masked)

    def find(self, ids: tuple[int, ...], start: int, stop: int) -> int | None:
        """The first decided position in [start, stop) whose token is one of `ids`."""
        if start >= stop:
            return None
        tokens, hits = self.tokens[start:stop], ~self.masked[start:stop]
        hits &= (tokens[:, None] == np.array(ids, dtype=np.int64)).any(-1)
        return start + int(hits.argmax()) if hits.any() else None

    def decided_range(self, start: int, ends: tuple[int, ...]) -> slice:
        """The positions from `start` up to the first mask, or up to and including the first of `ends` before it."""
        stop = self.first_mask(start)
        end = self.find(ends, start, stop)
        return slice(start, stop if end is None else end + 1)

    def answer(self, start: int, ends: tuple[int, ...]) -> Piece:
        """The tokens of `decided_range`."""
        if self.masked[start : start + 1].any():
            return Piece(logprobs=(), steps=())
        part = self.decided_range(start, ends)
        columns = (self.tokens, self.log_probs, self.steps)
        tokens, log_probs, steps = (tuple(column[part].tolist()) for column in columns)
        return Piece(tokens=tokens, logprobs=log_probs, steps=steps)

    def query(self, index: int, start: int, stop: int, logits_at: np.ndarray) -> Query:
        """The query of positions [start, stop) for lane `index`, with a copy of the tokens."""
        return Query(index, start, stop, torch.from_numpy(self.tokens[start:stop].copy()), torch.from_numpy(logits_at))


def num_lanes(canvas: Canvas, max_tokens: int) -> int:
    """The number of lanes of a request's decoder."""
    if canvas.branches is not None:
        return len(distinct_lengths(canvas.branches, max_tokens))
    return 2 if canvas.cfg_scale else 1


def distinct_lengths(branches: Branches, max_tokens: int) -> list[int]:
    """The block lengths that decode this canvas differently: all lengths below the answer's, and the first length that
    is not below it."""
    lengths = branches.block_lengths
    return [n for i, n in enumerate(lengths) if i == 0 or lengths[i - 1] < max_tokens]
