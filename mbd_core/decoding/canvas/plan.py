"""The interface between decoders that plan their rows on the host and engines: the forward that a decoder plans, its
update; and the lanes of a canvas."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.adjustments import Adjust
from mbd_core.decoding.blocks.canvas_config import Branches, Canvas, Score
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling

# The interface between decoders and engines: the forward that a decoder plans, and its update afterwards.
#
# A canvas is one sequence of fixed length, the prompt and `max_tokens` masks, under full attention. A decoder keeps
# it on one or more lanes (guidance has two, BlockBatch one for each branch), each with keys and values of its own.
#
# A decoder behind a stored prefix (`decoding/causal`) has one lane. Its rows begin where it likes, at the earliest
# behind what is stored (`num_stored`). Every row writes its keys, and the next row at the same positions overwrites
# them: so a row that is not to be stored is one behind which `num_stored` stays, and a partial commit is one behind
# which it grows by less than the row. Only keys before `num_stored` are shared with other requests.
#
# Shape legend: Q positions of one query, A those with logits, V vocabulary.


@dataclass(frozen=True, kw_only=True)
class CanvasTask:
    """One request for a decoder; the fields are the arguments of `canvas_decoder`.

    min_tokens      no position of the answer's first so many becomes a token that ends it
    stop_token_ids  tokens that end the answer beside `eos_token_ids`
    """

    prompt: tuple[int, ...]
    max_tokens: int
    canvas: Canvas
    sampling: Sampling
    eos_token_ids: tuple[int, ...]
    vocab: Vocab
    shift: bool
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        return (*self.eos_token_ids, *self.stop_token_ids)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.sampling.adjusts or self.min_tokens > 0


@dataclass(frozen=True)
class Query:
    """One row of a forward: positions [start, stop) of one lane.

    Their keys and values replace the old ones in the lane's cache before any position attends; then each position
    attends to the lane's first `num_keys` keys (`None`: all `length` of a canvas), without a mask. With `causal` it
    attends to those up to itself, and `num_keys` is `stop`.

    tokens     (Q,) int64 input ids, the mask id where masked
    logits_at  (A,) absolute positions in [start, stop) whose logits are returned. If the logits of position p - 1
               predict p (Dream), a decoder that fills p lists p - 1
    drafts     the row is of the request's draft adapter, if it has one
    denoises   its tokens are drawn ones that the model denoises (`models/gemma.py`), conditioned on the embeddings
               `expected` (Q, D), on the device; `None`: on nothing
    """

    lane: int
    start: int
    stop: int
    tokens: Tensor
    logits_at: Tensor
    num_keys: int | None = None
    causal: bool = False
    drafts: bool = False
    denoises: bool = False
    expected: Tensor | None = None


@dataclass(frozen=True)
class CanvasPlan:
    """The next forward: `copies` (source, target) of whole lanes' keys and values, in this order; then `queries`."""

    copies: list[tuple[int, int]]
    queries: list[Query]

    @property
    def num_positions(self) -> int:
        """Query positions of all lanes, packed without padding."""
        return sum(q.stop - q.start for q in self.queries)


@dataclass(frozen=True)
class CanvasUpdate:
    """What one forward changed, by (lane, block); for traces. Behind a prefix, block counts whole blocks of answer.

    accepted    masks that became tokens
    mask_ratio  share of the block's positions that were masked before, for every block in `accepted`
    edited      tokens that were replaced (BlockBatch's sync)
    """

    accepted: Mapping[tuple[int, int], int]
    mask_ratio: Mapping[tuple[int, int], float]
    edited: Mapping[tuple[int, int], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Guesses:
    """What the model predicts at each open position (P,), on the host: the token, its probability and the logarithm of
    that, and its score."""

    position_P: np.ndarray
    token_P: np.ndarray
    confidence_P: np.ndarray
    log_prob_P: np.ndarray
    score_P: np.ndarray

    def select(self, at: np.ndarray | slice) -> "Guesses":
        """The guess at some of the positions."""
        return Guesses(
            self.position_P[at], self.token_P[at], self.confidence_P[at], self.log_prob_P[at], self.score_P[at]
        )


@dataclass(frozen=True, kw_only=True)
class OpenLogits:
    """The logits (P, V) that predict a decoder's open positions in forward number `forward`, and how to read them;
    `score` is what positions are ranked by."""

    logits_PV: Tensor
    position_P: Tensor
    forward: int
    score: Score
    sampling: Sampling
    vocab: Vocab
    adjust: Adjust | None = None

    @property
    def kind(self) -> str | None:
        """Parts of one kind are read together; `None`: this part alone."""
        is_alone = self.sampling.draws or self.adjust is not None or self.score == "random"
        return None if is_alone else self.score


class PlannedDecoder(Protocol):
    """One request: a state machine without a model. `plan` changes nothing, `update` advances the state; it is
    `accept` of the guesses at `open_logits`, between which the guesses of many requests are one operation.
    `hold_to` says how many blocks the engine's budget leaves the request in the next forward, maybe none; with none it
    gives the same tokens one by one where `draft_length`, the positions of its drafts, is above 1.

    `num_stored` is how many of its leading positions are stored for good: 0 for a canvas.

    `tokens` begin at the prompt's end and stop before the first mask, or after the first EOS before that mask.
    `log_probs` are their log-probabilities in the forwards that accepted them, `steps` the numbers of these, from 1.
    `answer_from(n)` returns the answer after its first n tokens, which hold no EOS, in time linear in its result.
    """

    @property
    def num_lanes(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def draft_length(self) -> int: ...

    @property
    def num_stored(self) -> int: ...

    @property
    def num_forwards(self) -> int: ...

    @property
    def done(self) -> bool: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def log_probs(self) -> list[float]: ...

    @property
    def steps(self) -> list[int]: ...

    def answer_from(self, number: int) -> Piece: ...

    def hold_to(self, num_blocks: int) -> None: ...

    def plan(self) -> CanvasPlan: ...

    def update(self, logits: list[Tensor]) -> CanvasUpdate: ...

    def open_logits(self, logits: list[Tensor]) -> OpenLogits: ...

    def accept(self, opened: OpenLogits, guesses: Guesses) -> CanvasUpdate: ...


@runtime_checkable
class ReadingDecoder(PlannedDecoder, Protocol):
    """A decoder that reads its forward's logits on the device, in pieces, because the whole of them is large: `read`
    instead of `open_logits`, and on the host `take` of what was read instead of `accept`.

    `logits_of` gives the logits of a range of the positions asked for, `expect` the mean embeddings (P, D) under
    probabilities (P, V).
    """

    def read(self, logits_of: Callable[[slice], Tensor], expect: Callable[[Tensor], Tensor]) -> Any: ...

    def take(self, reading: Any) -> CanvasUpdate: ...


# A lane: one copy of a canvas, with keys and values of its own. Guidance has two, BlockBatch one for each branch.


@dataclass
class Lane:
    """The tokens of a canvas (L,), on the host. Masked is a boolean, never "token == mask id".

    log_probs  of each token in the forward that accepted it, whose number is in `steps`
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

    def decided_range(self, start: int, eos_token_ids: tuple[int, ...]) -> slice:
        """The positions from `start` up to the first mask, or up to and including the first EOS before that mask."""
        stop = self.first_mask(start)
        eos = self.find(eos_token_ids, start, stop)
        return slice(start, stop if eos is None else eos + 1)

    def answer(self, start: int, eos_token_ids: tuple[int, ...]) -> Piece:
        """The tokens of `decided_range`."""
        if self.masked[start : start + 1].any():
            return Piece(logprobs=(), steps=())
        part = self.decided_range(start, eos_token_ids)
        columns = (self.tokens, self.log_probs, self.steps)
        tokens, log_probs, steps = (tuple(column[part].tolist()) for column in columns)
        return Piece(tokens=tokens, logprobs=log_probs, steps=steps)

    def query(self, index: int, start: int, stop: int, logits_at: np.ndarray) -> Query:
        """The query of positions [start, stop) for lane `index`, with a copy of the tokens."""
        return Query(index, start, stop, torch.from_numpy(self.tokens[start:stop].copy()), torch.from_numpy(logits_at))


def num_lanes(canvas: Canvas, max_tokens: int) -> int:
    """How many lanes a request's decoder has."""
    if canvas.branches is not None:
        return len(distinct_lengths(canvas.branches, max_tokens))
    return 2 if canvas.cfg_scale else 1


def distinct_lengths(branches: Branches, max_tokens: int) -> list[int]:
    """The block lengths that decode this canvas differently: all that are shorter, and the first that is not."""
    lengths = branches.block_lengths
    return [n for i, n in enumerate(lengths) if i == 0 or lengths[i - 1] < max_tokens]
