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
                   its forwards can be run again; refused if that is impossible
    experts        report with the rollout which experts each forward chose; the prompt is then stored anew, and every
                   step of the request is packed
    replay         report the same for any method, and the overwritten tokens, for display
    frames         report the request's slots after every forward (`Frame`)
    committed      the beginning of the answer, which another engine committed; decoding continues after it. It
                   counts in `max_tokens` and is in the output's tokens, but no step hands it out again
    first_forward  number of its forwards in that engine; the noise of drawn tokens continues from this number
    adapter        the LoRA adapter to decode with, by the name under which the engine loaded it
    grammar        the answer's text must match it; the answer then ends with an EOS within `max_tokens`
    closing        under a grammar: tokens that lead from `committed` to the answer's end (`StepOutput.closing`)
    template       if not empty, the `max_tokens` positions after the prompt: a token is fixed, and `None` is a hole
                   to be filled. Fixed tokens are in the output, and do not count as generated
    scored         fill in the template from the left, one position a forward, and report a `TokenScore` for each
                   token, the tokens of its holes too
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
        """The API request whose choice this is: the id without the number after the last hyphen."""
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
        """A piece of the answer, with the columns that the request asks for."""
        return replace(
            piece,
            logprobs=piece.logprobs if self.logprobs or self.has_rollout else None,
            tops=piece.tops if self.top_logprobs else None,
            steps=piece.steps if self.has_rollout else None,
        )

    @property
    def nothing(self) -> Piece:
        """An empty piece of the answer, with the columns that the request asks for."""
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
        """The position at which decoding begins, after `number` tokens of prompt and answer: the start of a block, or
        with planned rows the end of the stored tokens.

        With `carry` decoding begins at the last block with a known token, whose store gives the token after it.
        """
        origin, size = self.decoding.grid_origin(len(self.prompt)), self.decoding.block_size
        planned, seeds = self.decoding.planned, int(self.carries)
        if planned is not None:
            size, seeds = planned.grid, planned.seeds
        return origin + max(0, number - origin - seeds) // size * size

    def num_generated(self, number: int) -> int:
        """The number of tokens that were not fixed, among the answer's first `number` tokens."""
        return number - sum(token is not None for token in self.template[:number])

    def rest_of_block(self, position: int) -> int:
        """Positions from `position`, counted from the prompt's first, to the end of its block."""
        size, origin = self.decoding.block_size, self.decoding.grid_origin(len(self.prompt))
        return size - (position - origin) % size


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """A token's natural log-probability in the forward before it was filled in, and that forward's likeliest token."""

    logprob: float
    likeliest: int
    likeliest_logprob: float


@dataclass(frozen=True, kw_only=True)
class Output:
    """A finished request: its answer, why it ended, its counts.

    piece        its useful tokens (EOS excluded) after `committed`, with the columns that the request asked for
    tail         for a rollout: the tokens that were committed after the answer in its last block, EOS first, because
                 the block's other tokens have seen them; empty if `max_tokens` ended the answer
    committed    the request's `committed`
    stop_reason  the stop string or the stop token that ended the answer
    experts      if requested, the experts of all forwards in order; comparisons ignore them
    scores       of a scored request: one score for each token of `piece`
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
    """One step's result for one request: the committed piece of its answer, and the output if the request ended.

    counts   the request's counts up to this step
    piece    the new useful tokens
    tail     in a rollout's last step: the tokens that were committed after the answer (`Output.tail`)
    closing  under a grammar: the next tokens that would complete the answer within its budget
    weights  the numbers of the weights that decoded its first and its last tokens so far
    frame    if the request asked for frames, its slots after the step's forward
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
