"""The types of an engine's input and output: a request, its outputs, and the traces of its steps."""

from dataclasses import dataclass
from typing import Literal

from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.frame import Frame
from mbd_core.decoding.grammar import Grammar
from mbd_core.decoding.rollout import Rollout
from mbd_core.decoding.sampling_config import Sampling

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, to continue by at most `max_tokens` tokens; an EOS ends it unless `ignore_eos` is set.

    logprobs       report the log-probability of every token in the forward that accepted it
    rollout        report in which forward every token was accepted, and its log-probability there (`Rollout`), so that
                   its forwards can be run again; refused where they cannot
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
    logprobs: bool = False
    rollout: bool = False
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
    def has_rollout(self) -> bool:
        """Whether its output has a `Rollout`."""
        return self.rollout or self.replay

    @property
    def steered(self) -> bool:
        """Whether the host decides some of its tokens."""
        return self.grammar is not None or bool(self.template)

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
    """

    num_prompt_tokens: int
    num_tokens: int
    num_forwards: int
    num_store_forwards: int
    num_prefill_forwards: int
    decode_seconds: float
    num_cached_tokens: int = 0
    num_preemptions: int = 0

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

    logprobs  if requested, the natural log-probability of each token in the forward that accepted it; not of the
              request's `committed` tokens, which an earlier engine accepted
    rollout   if requested, when each token was accepted, and the rest of the last block; not of `committed` tokens
    scores    of a request that was scored: one for each token; not of `committed` tokens
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    counts: Counts
    logprobs: tuple[float, ...] | None = None
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
