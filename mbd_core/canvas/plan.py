"""What a canvas decoder asks of a forward and what it makes of it: the terms between decoders and whoever runs them.

A canvas is one sequence of fixed length, the prompt and `max_tokens` masks, under full attention. A decoder keeps it
on one or more lanes (guidance has two, BlockBatch one a branch), each with keys and values of its own.

Shape legend: Q positions of one query, A those whose logits are asked for, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mbd_core.decoding.canvas_config import Canvas
from mbd_core.decoding.sampling import Sampling, Vocab


@dataclass(frozen=True, kw_only=True)
class CanvasTask:
    """One request as a decoder takes it; its fields are `canvas_decoder`'s."""

    prompt: tuple[int, ...]
    max_tokens: int
    canvas: Canvas
    sampling: Sampling
    eos_token_ids: tuple[int, ...]
    vocab: Vocab
    shift: bool


@dataclass(frozen=True)
class Query:
    """One row of a forward: positions [start, stop) of one lane.

    Their keys and values are written into the lane's cache, over what was there, before anything attends; each of them
    then attends to all `length` keys of the lane, without order.

    tokens     (Q,) int64 input ids, the mask id where masked
    logits_at  (A,) absolute positions in [start, stop) whose raw logit rows are wanted; a model whose row p - 1
               predicts p (Dream) is asked for p - 1
    """

    lane: int
    start: int
    stop: int
    tokens: Tensor
    logits_at: Tensor


@dataclass(frozen=True)
class CanvasPlan:
    """The next forward: first `copies` (source, target) of whole lanes' keys and values, in order, then `queries`."""

    copies: list[tuple[int, int]]
    queries: list[Query]

    @property
    def num_positions(self) -> int:
        """Query positions of all lanes, packed without padding."""
        return sum(q.stop - q.start for q in self.queries)


@dataclass(frozen=True)
class CanvasUpdate:
    """What one forward did, for traces, by (lane, block).

    accepted    masks that became tokens
    mask_ratio  share of the block that the forward saw masked, for every block in `accepted`
    edited      tokens that were replaced (BlockBatch's sync)
    """

    accepted: Mapping[tuple[int, int], int]
    mask_ratio: Mapping[tuple[int, int], float]
    edited: Mapping[tuple[int, int], int] = field(default_factory=dict)


class CanvasDecoder(Protocol):
    """One request: a state machine that never sees a model. `plan` changes nothing, `update` moves on.

    `tokens` are the decided ones from the prompt's end to the first mask, the first EOS included and nothing behind
    it; `log_probs` are theirs when they were accepted.
    """

    @property
    def num_lanes(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def num_forwards(self) -> int: ...

    @property
    def done(self) -> bool: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def log_probs(self) -> list[float]: ...

    def plan(self) -> CanvasPlan: ...

    def update(self, logits: list[Tensor]) -> CanvasUpdate: ...


@dataclass
class Lane:
    """The canvas as one lane has it, on the host. Masked is a boolean, never "token == mask id"."""

    tokens: Tensor
    masked: Tensor
    log_probs: Tensor

    @classmethod
    def fresh(cls, prompt: tuple[int, ...], max_tokens: int, mask_token_id: int) -> "Lane":
        """The prompt and `max_tokens` masks behind it."""
        tokens = torch.tensor([*prompt, *[mask_token_id] * max_tokens], dtype=torch.int64)
        masked = torch.zeros(len(tokens), dtype=torch.bool)
        masked[len(prompt) :] = True
        return cls(tokens, masked, torch.zeros(len(tokens), dtype=torch.float64))

    def copy(self) -> "Lane":
        return Lane(self.tokens.clone(), self.masked.clone(), self.log_probs.clone())

    def open(self, start: int, stop: int) -> Tensor:
        """Masked positions in [start, stop), ascending."""
        return self.masked[start:stop].nonzero()[:, 0] + start

    def fill(self, positions: Tensor, tokens: Tensor, log_probs: Tensor) -> None:
        self.tokens[positions] = tokens
        self.log_probs[positions] = log_probs
        self.masked[positions] = False

    def first_mask(self, start: int) -> int:
        """The first masked position from `start` on; the canvas's length where there is none."""
        rest = self.masked[start:]
        return start + int(rest.int().argmax()) if bool(rest.any()) else len(self.masked)

    def find(self, ids: tuple[int, ...], start: int, stop: int) -> int | None:
        """The first decided position in [start, stop) whose token is one of `ids`."""
        hits = torch.isin(self.tokens[start:stop], torch.tensor(ids, dtype=torch.int64)) & ~self.masked[start:stop]
        return start + int(hits.int().argmax()) if bool(hits.any()) else None

    def decided(self, start: int, eos_token_ids: tuple[int, ...]) -> slice:
        """The positions from `start` that are decided without a gap, up to the first EOS."""
        stop = self.first_mask(start)
        eos = self.find(eos_token_ids, start, stop)
        return slice(start, stop if eos is None else eos + 1)


def query(lane: int, canvas: Lane, start: int, stop: int, logits_at: Tensor) -> Query:
    """The query of [start, stop) with a snapshot of its tokens."""
    return Query(lane, start, stop, canvas.tokens[start:stop].clone(), logits_at)
