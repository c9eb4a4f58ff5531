"""The interface between engines and decoders that plan their rows on the host: a planned forward, and its update.

A canvas is one sequence of fixed length, the prompt and `max_tokens` masks, under full attention. A decoder keeps it
on one or more lanes (`lane.py`; guidance has two, BlockBatch one for each branch), each with its own keys and values.

A decoder that works after a stored prefix (`decoding/causal`) has one lane. Its rows begin anywhere from the end of
the stored positions (`num_stored`) on. Every row writes its keys, and the next row at the same positions overwrites
them. So a row is not stored if `num_stored` does not grow, and is partly stored if `num_stored` grows by less than the
row. Only keys before `num_stored` are shared with other requests.

Shape legend: Q positions of one query, A positions with logits, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.answers.slots import PlannedSlot
from mbd_core.decoding.blocks.adjustments import Adjust
from mbd_core.decoding.blocks.canvas_config import Canvas, Score
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verification import Draft
from mbd_core.decoding.grammar.closings import Search
from mbd_core.decoding.grammar.guide import Guide


@dataclass(frozen=True, kw_only=True)
class CanvasTask:
    """One request for a decoder; the fields are the arguments of `canvas_decoder`.

    min_tokens      number of the answer's first positions that get no token that ends the answer
    stop_token_ids  tokens that end the answer, in addition to `eos_token_ids`
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

    Their keys and values replace the old keys and values in the lane's cache before any position attends. Then each
    position attends to the lane's first `num_keys` keys (`None`: all `length` of a canvas), without a mask. With
    `causal` each position attends to the keys up to its own, and `num_keys` is `stop`.

    tokens     (Q,) int64 input ids, the mask id where masked
    logits_at  (A,) absolute positions in [start, stop) whose logits are returned. If the logits of position p - 1
               predict p (Dream), a decoder that fills p lists p - 1
    gap        `start` and `stop` are this many places past the tokens' own positions, whose places hold other keys. In
               a causal row each token sees the keys before its position, and itself; otherwise all tokens see the keys
               before the row's first position, and the row
    drafts     whether the request's draft adapter computes the row, if there is one
    by_draft_model  whether the engine's draft model, which has its own keys, computes the row
    denoises   whether the row's tokens are random and the model denoises them (`models/gemma.py`)
    expected   (Q, D) embeddings on the device that condition the denoising; `None`: no condition
    """

    lane: int
    start: int
    stop: int
    tokens: Tensor
    logits_at: Tensor
    num_keys: int | None = None
    causal: bool = False
    gap: int = 0
    drafts: bool = False
    by_draft_model: bool = False
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
    """The changes of one forward by (lane, block), for traces. After a stored prefix, `block` counts whole blocks of
    the answer.

    accepted    number of masks that became tokens
    mask_ratio  share of the block's positions that were masked before, for every block in `accepted`
    edited      number of tokens that were replaced (BlockBatch's sync)
    drafted     number of drafted tokens that this forward judged
    confirmed   number of drafted tokens that it confirmed
    slots       for a decoder with a Block Buffer: the blocks that the forward held, in their order
    """

    accepted: Mapping[tuple[int, int], int]
    mask_ratio: Mapping[tuple[int, int], float]
    edited: Mapping[tuple[int, int], int] = field(default_factory=dict)
    drafted: int = 0
    confirmed: int = 0
    slots: tuple[PlannedSlot, ...] = ()


@dataclass(frozen=True)
class Guesses:
    """The model's prediction at each open position (P,), on the host: token, probability, log-probability, score."""

    position_P: np.ndarray
    token_P: np.ndarray
    confidence_P: np.ndarray
    log_prob_P: np.ndarray
    score_P: np.ndarray

    def select(self, at: np.ndarray | slice) -> "Guesses":
        """The guesses at some of the positions."""
        return Guesses(
            self.position_P[at], self.token_P[at], self.confidence_P[at], self.log_prob_P[at], self.score_P[at]
        )


@dataclass(frozen=True, kw_only=True)
class OpenLogits:
    """The logits (P, V) that predict a decoder's open positions in forward number `forward`, with the rules to read
    them.

    `score` is the measure that ranks positions. With a `draft` they are a verification's logits (`judge`), and every
    position is there twice: for its drafted token, and for the token that a refusal gives.
    """

    logits_PV: Tensor
    position_P: Tensor
    forward: int
    score: Score
    sampling: Sampling
    vocab: Vocab
    adjust: Adjust | None = None
    draft: Draft | None = None

    @property
    def kind(self) -> str | None:
        """Logits of the same kind are read together; `None`: these logits are read by themselves."""
        is_alone = self.sampling.draws or self.adjust is not None or self.draft is not None or self.score == "random"
        return None if is_alone else self.score


class PlannedDecoder(Protocol):
    """One request: a state machine without a model.

    `plan` changes nothing; `update` advances the state. `update` calls `open_logits`, computes guesses and calls
    `accept`; an engine computes the guesses of many requests in one operation. `hold_to` sets the number of blocks
    that the engine's budget allows the request in the next forward. With 0 blocks, a decoder whose drafts have more
    than one position (`draft_length`) gives the same tokens one by one.

    `num_stored` is the number of leading positions that are stored for good: 0 for a canvas. `tokens` begin at the
    prompt's end and stop before the first mask, or after the first EOS before that mask. `log_probs` are their
    log-probabilities in the forwards that accepted them, and `steps` these forwards' numbers, from 1. `answer_from(n)`
    returns the answer after its first n tokens (which hold no EOS), in time linear in its result.
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
    """A decoder that reads its forward's logits on the device in pieces, because all of them would be large.

    It has `read` instead of `open_logits`, and instead of `accept` it has `take`, which gets the reading on the host.
    `logits_of` gives the logits of a range of its positions, `expect` the mean embeddings (P, D) under probabilities
    (P, V).
    """

    def read(self, logits_of: Callable[[slice], Tensor], expect: Callable[[Tensor], Tensor]) -> Any: ...

    def take(self, reading: Any) -> CanvasUpdate: ...


@runtime_checkable
class GuidedDecoder(PlannedDecoder, Protocol):
    """A decoder that can follow a grammar. Then `accept_decided` takes the place of `accept`.

    On the rank that has the guide, `decide` gives tokens and their probabilities from this forward's guesses, and lets
    the guide take in the decided tokens. All ranks accept them.
    """

    def decide(self, guide: Guide, guesses: Guesses, search: Search) -> list[tuple[int, float]]: ...

    def accept_decided(
        self, opened: OpenLogits, guesses: Guesses, decided: list[tuple[int, float]]
    ) -> CanvasUpdate: ...
