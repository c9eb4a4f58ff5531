"""The types of an engine's input and output: a request, its outputs, frames, and the traces of its steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, Self

import numpy as np

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.grammar.grammar import Grammar

# What one forward left in a request's Block Buffer: provisional, unlike what is committed.


@dataclass(frozen=True, kw_only=True)
class FrameSlot:
    """A slot that held a block in the forward.

    state     the name of the `SlotState` that the forward saw; "IN_CACHE" if it stored the block, which has left the
              buffer then
    tokens    the block after the forward, `None` where it is masked; positions past the request's budget are left out
    accepted  offsets of the tokens that this forward filled; not those that the store of the block before carried
    edited    offsets of the tokens that it overwrote
    """

    state: str
    tokens: tuple[int | None, ...]
    accepted: tuple[int, ...]
    edited: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A request's slots after one forward.

    forward    its number among the request's forwards, from 1, as in a step map
    position   where the first slot begins, counted from the answer's first token; negative where the prompt's end
               stands in the same block
    num_slots  its buffer size; slots without a block are not listed
    """

    forward: int
    position: int
    num_slots: int
    slots: tuple[FrameSlot, ...]


# When each token of an answer was accepted, and how likely it was: what a replay of its forwards needs.


@dataclass(frozen=True)
class Edit:
    """A token that stood at an `index` of an answer, from forward `step` on, until a later forward overwrote it."""

    index: int
    step: int
    token: int


@dataclass(frozen=True)
class ForwardExperts:
    """The experts of a request's tokens in one forward.

    forward  its number among the request's forwards, from 1, as in a step map; 0 for one that stored tokens alone
    start    the position of the first of these T neighbouring tokens, counted from the prompt's first
    ids      (T, M, K), uint8 or uint16: of each token the K experts of each of the M layers that have some
    """

    forward: int
    start: int
    ids: np.ndarray

    def columns(self) -> dict[str, Any]:
        """It as plain values; `of` reads them."""
        return {"forward": self.forward, "start": self.start, "shape": list(self.ids.shape), "ids": self.ids.tobytes()}

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Self:
        size = len(columns["ids"]) // math.prod(columns["shape"])
        ids = np.frombuffer(columns["ids"], dtype=f"<u{size}").reshape(columns["shape"])
        return cls(columns["forward"], columns["start"], ids)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """An answer's step map, its log-probabilities, and the rest of its terminal block.

    Where a filled token stays, forward k of a request (k = 1, 2, ...) has seen the prompt and the tokens whose step is
    less than k, and masks everywhere else. So it can be run again, and it predicts the tokens whose step is k. Where
    tokens are overwritten, or a canvas is filled, the map shows how the answer came about (`Request.replay`).

    steps     of each token: the forward that accepted it, or was the last to overwrite it; 0 for one that was fixed
              before the first forward
    edits     tokens of the answer that were overwritten
    logprobs  of each token: its natural log-probability in that forward; with DMax, which rates a filled position in
              every forward, in the last one before its block was final
    tail_*    what was committed behind the answer in its last block: the EOS, and tokens after it, which the others of
              their block have seen. Empty before the end. Positions past `max_tokens` were masked to the end, and are
              no part of it
    experts   where asked for, those of all forwards in order, of a whole answer alone; no part of a comparison
    """

    steps: tuple[int, ...] = ()
    edits: tuple[Edit, ...] = ()
    logprobs: tuple[float, ...] = ()
    tail_tokens: tuple[int, ...] = ()
    tail_steps: tuple[int, ...] = ()
    tail_logprobs: tuple[float, ...] = ()
    experts: tuple[ForwardExperts, ...] = field(default=(), compare=False)

    def then(self, other: Self) -> "Rollout":
        """This part of an answer and the next one."""
        return Rollout(
            steps=self.steps + other.steps,
            edits=self.edits + tuple(replace(edit, index=edit.index + len(self.steps)) for edit in other.edits),
            logprobs=self.logprobs + other.logprobs,
            tail_tokens=other.tail_tokens,
            tail_steps=other.tail_steps,
            tail_logprobs=other.tail_logprobs,
        )

    def cut(self, tokens: tuple[int, ...], number: int, *, room: int) -> "Rollout":
        """The part of the first `number` of its `tokens`; the next ones become the tail, of at most `room` tokens."""
        tail = slice(number, number + room)
        return Rollout(
            steps=self.steps[:number],
            edits=tuple(edit for edit in self.edits if edit.index < number),
            logprobs=self.logprobs[:number],
            tail_tokens=(tokens + self.tail_tokens)[tail],
            tail_steps=(self.steps + self.tail_steps)[tail],
            tail_logprobs=(self.logprobs + self.tail_logprobs)[tail],
        )

    def without(self, number: int) -> "Rollout":
        """The part after its first `number` tokens."""
        return Rollout(
            steps=self.steps[number:],
            edits=tuple(replace(edit, index=edit.index - number) for edit in self.edits if edit.index >= number),
            logprobs=self.logprobs[number:],
            tail_tokens=self.tail_tokens,
            tail_steps=self.tail_steps,
            tail_logprobs=self.tail_logprobs,
        )


# The states of a slot, in the Block Buffer and in traces.


class SlotState(IntEnum):
    """DUMMY -> ACTIVE -> TO_CACHE -> IN_CACHE; `block_buffer.py` says when a slot's state changes.

    No slot of a buffer is IN_CACHE: a stored block frees its slot.
    """

    DUMMY = 0
    ACTIVE = 1
    TO_CACHE = 2
    IN_CACHE = 3


CANVAS_STATE = "CANVAS"  # the state in traces of a canvas's blocks, because a canvas has no slots


FinishReason = Literal["stop", "length", "abort"]


MAX_TOPS = 20  # likeliest tokens of a position that may be asked for

TopTokens = tuple[tuple[int, float], ...]
"""The likeliest tokens of a position and their natural log-probabilities, likeliest first."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, to continue by at most `max_tokens` tokens; an EOS ends it unless `ignore_eos` is set.

    min_tokens     no position of the answer's first `min_tokens` becomes a token that ends it
    stop_token_ids tokens that end the answer as an EOS does, and are no part of it
    logprobs       report the log-probability of every token in the forward that accepted it
    top_logprobs   and the so many likeliest tokens' there, at most `MAX_TOPS`
    rollout        report in which forward every token was accepted, and its log-probability there (`Rollout`), so that
                   its forwards can be run again; refused where they cannot
    experts        report with the rollout which experts each forward chose; its prompt is stored anew, and every step
                   that it takes part in is packed
    replay         report the same of any method, with the tokens that were overwritten, to be looked at
    frames         report what every forward left in its slots (`Frame`)
    committed      the beginning of the answer, which another engine committed: decoding goes on after it. It counts in
                   `max_tokens`, stands in the output's tokens, and is not handed out again
    first_forward  the forwards that it took part in there: the noise of drawn tokens goes on from that number
    adapter        the LoRA adapter to decode with, by the name under which the engine loaded it
    grammar        what the text of the answer must match; it then ends with an EOS within `max_tokens`
    closing        where tokens are committed under a grammar: a way from them to the answer's end (`StepOutput`)
    template       if not empty, what stands behind the prompt, `max_tokens` positions: a token is fixed, and `None` is
                   a hole to be filled. Fixed tokens stand in the output, and do not count as generated
    scored         put the template's tokens in one a forward, the leftmost, and report `TokenScore`s; it may have no
                   hole
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    decoding: DecodingConfig
    sampling: Sampling = Sampling()
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    rollout: bool = False
    experts: bool = False
    replay: bool = False
    frames: bool = False
    committed: tuple[int, ...] = ()
    first_forward: int = 0
    adapter: str | None = None
    grammar: Grammar | None = None
    closing: tuple[int, ...] = ()
    template: tuple[int | None, ...] = ()
    scored: bool = False

    @property
    def group(self) -> str:
        """What it is one of several choices of: its id without the number behind the last hyphen."""
        return self.request_id.rpartition("-")[0] or self.request_id

    @property
    def draft_adapter(self) -> str | None:
        """The LoRA adapter of the rows that draft, if it is not `adapter`."""
        return None if self.decoding.causal is None else self.decoding.causal.draft_adapter

    @property
    def has_rollout(self) -> bool:
        """Whether its output has a `Rollout`."""
        return self.rollout or self.replay

    @property
    def adjusts(self) -> bool:
        """Whether it changes logits before a token is chosen (`Adjustments`)."""
        return self.sampling.adjusts or self.min_tokens > 0

    def ends(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end its answer; `eos_token_ids` are the model's."""
        return (*(() if self.ignore_eos else eos_token_ids), *self.stop_token_ids)

    @property
    def steered(self) -> bool:
        """Whether the host decides some of its tokens."""
        return self.grammar is not None or bool(self.template) or self.decoding.edit is not None

    @property
    def carries(self) -> bool:
        """Whether a store fills the next block's first position; the host decides all tokens of a steered request."""
        return self.decoding.carry and not self.steered

    def first_block_start(self, number: int) -> int:
        """Where decoding begins, behind `number` tokens of prompt and answer: at a block, or with planned rows behind
        the tokens that are stored.

        With `carry` it is the last block that has a known token, so that its store gives the token after it.
        """
        origin, size = self.decoding.grid_origin(len(self.prompt)), self.decoding.block_size
        planned, seeds = self.decoding.planned, int(self.carries)
        if planned is not None:
            size, seeds = planned.store or 1, planned.seeds
        return origin + max(0, number - origin - seeds) // size * size

    def num_generated(self, number: int) -> int:
        """Of the first `number` tokens of its answer, those that were not fixed."""
        return number - sum(token is not None for token in self.template[:number])

    def rest_of_block(self, position: int) -> int:
        """Positions from `position`, counted from the prompt's first, to the end of its block."""
        size, origin = self.decoding.block_size, self.decoding.grid_origin(len(self.prompt))
        return size - (position - origin) % size


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A request's raw counts, from which every rate is computed.

    num_tokens            useful tokens: generated before EOS, at most max_tokens
    num_forwards          NFE: forwards that its blocks took part in, store-only ones included
    num_store_forwards    those of num_forwards that decoded none of its blocks (SingleBD's bubble)
    num_prefill_forwards  forwards that carried only its prompt, or repeated what a preemption undid; not in NFE
    decode_seconds        wall time of the steps counted in num_forwards
    num_cached_tokens     tokens of the prompt that came from the prefix cache
    num_preemptions       how often the request was preempted
    queue_seconds         wall time from its arrival at the engine to its first batch row
    prompt_seconds        from there to the end of its prompt's own forwards; 0 where the prefix cache held all of it
    """

    num_prompt_tokens: int
    num_tokens: int
    num_forwards: int
    num_store_forwards: int
    num_prefill_forwards: int
    decode_seconds: float
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_seconds: float = field(default=0.0, compare=False)
    prompt_seconds: float = field(default=0.0, compare=False)

    @property
    def tpf(self) -> float:
        """Useful tokens per forward."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """A token's natural log-probability in the forward before it was put in, and the likeliest token's there."""

    logprob: float
    likeliest: int
    likeliest_logprob: float


@dataclass(frozen=True, kw_only=True)
class Output:
    """A finished request: its useful tokens (EOS excluded), why it ended, its counts.

    stop_reason  the stop string, or the one of the request's `stop_token_ids`, that ended it
    logprobs  if requested, the natural log-probability of each token in the forward that accepted it; not of the
              request's `committed` tokens, which an earlier engine accepted
    tops      if requested, the likeliest tokens of each place in that forward; empty where no forward had logits
    rollout   if requested, when each token was accepted, and the rest of the last block; not of `committed` tokens
    scores    of a request that was scored: one for each token; not of `committed` tokens
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    counts: Counts
    stop_reason: int | str | None = None
    logprobs: tuple[float, ...] | None = None
    tops: tuple[TopTokens, ...] | None = None
    rollout: Rollout | None = None
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step committed for one request: the new useful tokens, and the whole output if the request ended.

    counts   the request's counts up to this step
    closing  under a grammar: tokens that complete the answer within its budget, if it goes on with them
    weights  the numbers of the weights that decoded its first and its last tokens so far
    frame    where the request asked for frames, what the step's forward left in its slots
    """

    request_id: str
    new_tokens: tuple[int, ...]
    output: Output | None
    counts: Counts
    logprobs: tuple[float, ...] | None = None
    tops: tuple[TopTokens, ...] | None = None
    rollout: Rollout | None = None
    closing: tuple[int, ...] = ()
    weights: tuple[int, int] = (0, 0)
    frame: Frame | None = None

    @property
    def commits(self) -> bool:
        """Whether it has more than a frame."""
        return bool(self.new_tokens) or self.output is not None


def aborted_step(output: Output, *, weights: tuple[int, int] = (0, 0)) -> StepOutput:
    """The last step of a request that was aborted."""
    return StepOutput(
        request_id=output.request_id, new_tokens=(), output=output, counts=output.counts, weights=weights
    )


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One slot of a request in one step; for a canvas, one lane.

    block        index of the slot's block, from the beginning of the request's block grid
    state        name of the slot's `SlotState` in the forward, or `CANVAS_STATE`
    mask_ratio   share of the block's positions that were masked before the forward
    accepted     number of positions that became tokens
    edited       number of tokens that were overwritten
    tokens       in a detailed trace: the tokens after the step, -1 where masked
    confidences  in a detailed trace: the confidence of each token in the forward that wrote it (with DMax: in the last
                 forward), 0 where masked
    """

    request_id: str
    step: int
    slot: int
    block: int
    state: str
    mask_ratio: float
    accepted: int
    edited: int = 0
    tokens: tuple[int, ...] | None = None
    confidences: tuple[float, ...] | None = None
