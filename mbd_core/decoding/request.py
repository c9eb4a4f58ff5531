"""The nouns that cross rooms: what goes into the engine, what comes out, and what a step leaves behind."""

from dataclasses import dataclass
from typing import Literal

from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.sampling import Sampling

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued by at most `max_tokens` tokens; EOS ends it unless `ignore_eos`.

    logprobs  report the log-probability of every token at the forward that accepted it
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    decoding: DecodingConfig
    sampling: Sampling = Sampling()
    ignore_eos: bool = False
    logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class Counts:
    """A request's raw counts, of which every rate is computed.

    num_forwards          NFE: forwards its blocks took part in, store-only ones included
    num_store_forwards    those of them in which no block of it was being decoded (SingleBD's bubble)
    num_prefill_forwards  forwards that carried only its prompt, or repeated what a preemption undid; not in NFE
    num_tokens            useful tokens: generated before EOS, at most max_tokens
    decode_seconds        wall time of the steps counted in num_forwards
    num_cached_tokens     of the prompt, found in the prefix cache
    num_preemptions       how often it had to leave its pages to an older request
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
class Output:
    """A finished request: its useful tokens (EOS excluded), why it ended, its counts.

    logprobs  natural log-probability of each token at its acceptance, where the request asked for it
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    counts: Counts
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step committed for one request: the new useful tokens, and the whole output if that was the last."""

    request_id: str
    new_tokens: tuple[int, ...]
    output: Output | None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One slot in one step. `state` (a `SlotState`'s name, or CANVAS for a lane of a full-attention request) and
    `mask_ratio` are what the forward saw, the rest is what it did.

    accepted     positions that became tokens
    edited       tokens that were overwritten
    tokens       on request: the slot's tokens after the step, -1 where masked
    confidences  on request: of each position, the confidence at which its token was last accepted, 0 where masked
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
