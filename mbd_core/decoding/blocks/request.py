"""An engine's input and output: a request, each step's share of its answer, and the finished answer."""

from dataclasses import dataclass, field, replace
from typing import Literal

from mbd_core.decoding.answers.counts import Counts
from mbd_core.decoding.answers.piece import ForwardExperts, Piece
from mbd_core.decoding.answers.slots import Frame
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.grammar.grammar import Grammar

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, to continue by at most `max_tokens` tokens; an EOS ends it unless `ignore_eos` is set.

    min_tokens     no position of the answer's first `min_tokens` becomes a token that ends it
    stop_token_ids tokens that end the answer as an EOS does, and are no part of it
    logprobs       report the log-probability of every token in the forward that accepted it
    top_logprobs   number of likeliest tokens to report beside it, at most `MAX_TOPS`
    rollout        report in which forward every token was accepted, and its log-probability there (`Piece`), so that
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
        """The API request whose choice this is: the id without the number behind the last hyphen."""
        return self.request_id.rpartition("-")[0] or self.request_id

    @property
    def draft_adapter(self) -> str | None:
        """The LoRA adapter of the rows that draft, if it is not `adapter`."""
        return None if self.decoding.causal is None else self.decoding.causal.draft_adapter

    @property
    def has_rollout(self) -> bool:
        """Whether the steps of its tokens are reported."""
        return self.rollout or self.replay

    def asked(self, piece: Piece) -> Piece:
        """A piece of its answer with the columns that it asks for."""
        return replace(
            piece,
            logprobs=piece.logprobs if self.logprobs or self.has_rollout else None,
            tops=piece.tops if self.top_logprobs else None,
            steps=piece.steps if self.has_rollout else None,
        )

    @property
    def nothing(self) -> Piece:
        """The piece of its answer that has no token, with the columns that it asks for."""
        return self.asked(Piece(logprobs=(), tops=(), steps=()))

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
            size, seeds = planned.grid, planned.seeds
        return origin + max(0, number - origin - seeds) // size * size

    def num_generated(self, number: int) -> int:
        """How many of the answer's first `number` tokens were not fixed."""
        return number - sum(token is not None for token in self.template[:number])

    def rest_of_block(self, position: int) -> int:
        """Positions from `position`, counted from the prompt's first, to the end of its block."""
        size, origin = self.decoding.block_size, self.decoding.grid_origin(len(self.prompt))
        return size - (position - origin) % size


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """A token's natural log-probability in the forward before it was put in, and the likeliest token's there."""

    logprob: float
    likeliest: int
    likeliest_logprob: float


@dataclass(frozen=True, kw_only=True)
class Output:
    """A finished request: its answer, why it ended, its counts.

    piece        its useful tokens (EOS excluded) behind `committed`, with the columns that the request asked for
    tail         for a rollout: the tokens that were committed behind the answer in its last block, EOS first, because
                 the others of that block have seen them; empty if `max_tokens` ended the answer
    committed    the request's, which an earlier engine decoded
    stop_reason  the stop string, or the one of the request's `stop_token_ids`, that ended it
    experts      where asked for, the experts of all forwards in order; no part of a comparison
    scores       of a request that was scored: one for each token of `piece`
    """

    request_id: str
    finish_reason: FinishReason
    counts: Counts
    piece: Piece
    tail: Piece = Piece()
    committed: tuple[int, ...] = ()
    stop_reason: int | str | None = None
    experts: tuple[ForwardExperts, ...] = field(default=(), compare=False)
    scores: tuple[TokenScore, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the answer."""
        return self.committed + self.piece.tokens


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step committed for one request: a piece of its answer, and the whole output if the request ended.

    counts   the request's counts up to this step
    piece    the new useful tokens
    tail     in a rollout's last step: what was committed behind the answer (`Output`)
    closing  under a grammar: tokens that complete the answer within its budget, if it goes on with them
    weights  the numbers of the weights that decoded its first and its last tokens so far
    frame    where the request asked for frames, what the step's forward left in its slots
    """

    request_id: str
    output: Output | None
    counts: Counts
    piece: Piece = Piece()
    tail: Piece = Piece()
    closing: tuple[int, ...] = ()
    weights: tuple[int, int] = (0, 0)
    frame: Frame | None = None

    @property
    def commits(self) -> bool:
        """Whether it has more than a frame."""
        return bool(self.piece) or self.output is not None


def aborted_step(output: Output, *, weights: tuple[int, int] = (0, 0)) -> StepOutput:
    """The last step of a request that was aborted."""
    return StepOutput(request_id=output.request_id, output=output, counts=output.counts, weights=weights)
