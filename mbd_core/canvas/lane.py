"""A lane: one copy of a canvas, with keys and values of its own. Guidance has two, BlockBatch one for each branch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.canvas.plan import Query
from mbd_core.decoding.canvas_config import Branches, Canvas


@dataclass
class Lane:
    """The tokens of a canvas on the host. Masked is a boolean, never "token == mask id".

    log_probs  of each token in the forward that accepted it, whose number is in `steps`
    """

    tokens: Tensor
    masked: Tensor
    log_probs: Tensor
    steps: Tensor

    @classmethod
    def fresh(cls, prompt: tuple[int, ...], max_tokens: int, mask_token_id: int) -> "Lane":
        """The prompt, followed by `max_tokens` masks."""
        tokens = torch.tensor([*prompt, *[mask_token_id] * max_tokens], dtype=torch.int64)
        masked = torch.zeros(len(tokens), dtype=torch.bool)
        masked[len(prompt) :] = True
        return cls(tokens, masked, torch.zeros(len(tokens), dtype=torch.float64), torch.zeros_like(tokens))

    def copy(self) -> "Lane":
        return Lane(self.tokens.clone(), self.masked.clone(), self.log_probs.clone(), self.steps.clone())

    def open_positions(self, start: int, stop: int) -> Tensor:
        """Masked positions in [start, stop), ascending."""
        return self.masked[start:stop].nonzero()[:, 0] + start

    def fill(self, positions: Tensor, tokens: Tensor, log_probs: Tensor, *, step: int) -> None:
        self.tokens[positions] = tokens
        self.log_probs[positions] = log_probs
        self.steps[positions] = step
        self.masked[positions] = False

    def first_mask(self, start: int) -> int:
        """The first masked position from `start` on; the canvas's length if there is none."""
        rest = self.masked[start:]
        return start + int(rest.int().argmax()) if bool(rest.any()) else len(self.masked)

    def find(self, ids: tuple[int, ...], start: int, stop: int) -> int | None:
        """The first decided position in [start, stop) whose token is one of `ids`."""
        hits = torch.isin(self.tokens[start:stop], torch.tensor(ids, dtype=torch.int64)) & ~self.masked[start:stop]
        return start + int(hits.int().argmax()) if bool(hits.any()) else None

    def decided_range(self, start: int, eos_token_ids: tuple[int, ...]) -> slice:
        """The positions from `start` up to the first mask, or up to and including the first EOS before that mask."""
        stop = self.first_mask(start)
        eos = self.find(eos_token_ids, start, stop)
        return slice(start, stop if eos is None else eos + 1)

    def query(self, index: int, start: int, stop: int, logits_at: Tensor) -> Query:
        """The query of positions [start, stop) for lane `index`, with a copy of the tokens."""
        return Query(index, start, stop, self.tokens[start:stop].clone(), logits_at)


def num_lanes(canvas: Canvas, max_tokens: int) -> int:
    """How many lanes a request's decoder has."""
    if canvas.branches is not None:
        return len(distinct_lengths(canvas.branches, max_tokens))
    return 2 if canvas.cfg_scale else 1


def distinct_lengths(branches: Branches, max_tokens: int) -> list[int]:
    """The block lengths that decode this canvas differently: all that are shorter, and the first that is not."""
    lengths = branches.block_lengths
    return [n for i, n in enumerate(lengths) if i == 0 or lengths[i - 1] < max_tokens]
