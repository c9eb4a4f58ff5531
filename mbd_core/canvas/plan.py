"""The interface between canvas decoders and engines: the forward that a decoder plans, and its update afterwards.

A canvas is one sequence of fixed length, the prompt and `max_tokens` masks, under full attention. A decoder keeps it
on one or more lanes (guidance has two, BlockBatch one for each branch), each with keys and values of its own.

Shape legend: Q positions of one query, A those with logits, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from mbd_core.decoding.canvas_config import Canvas
from mbd_core.decoding.sampling import Vocab
from mbd_core.decoding.sampling_config import Sampling


@dataclass(frozen=True, kw_only=True)
class CanvasTask:
    """One request for a decoder; the fields are the arguments of `canvas_decoder`."""

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

    Their keys and values replace the old ones in the lane's cache before any position attends; then each position
    attends to all `length` keys of the lane, without a mask.

    tokens     (Q,) int64 input ids, the mask id where masked
    logits_at  (A,) absolute positions in [start, stop) whose logits are returned. If the logits of position p - 1
               predict p (Dream), a decoder that fills p lists p - 1
    """

    lane: int
    start: int
    stop: int
    tokens: Tensor
    logits_at: Tensor


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
    """What one forward changed, by (lane, block); for traces.

    accepted    masks that became tokens
    mask_ratio  share of the block's positions that were masked before, for every block in `accepted`
    edited      tokens that were replaced (BlockBatch's sync)
    """

    accepted: Mapping[tuple[int, int], int]
    mask_ratio: Mapping[tuple[int, int], float]
    edited: Mapping[tuple[int, int], int] = field(default_factory=dict)


class CanvasDecoder(Protocol):
    """One request: a state machine without a model. `plan` changes nothing, `update` advances the state.

    `tokens` begin at the prompt's end and stop before the first mask, or after the first EOS before that mask.
    `log_probs` are their log-probabilities in the forwards that accepted them, `steps` the numbers of these, from 1.
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

    @property
    def steps(self) -> list[int]: ...

    def plan(self) -> CanvasPlan: ...

    def update(self, logits: list[Tensor]) -> CanvasUpdate: ...
