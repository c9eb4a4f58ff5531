"""What crosses rooms: a request that goes into an engine, its outputs, and the traces of its steps."""

from dataclasses import dataclass
from typing import Literal

from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.sampling import Sampling

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued by at most `max_tokens` tokens; EOS ends it unless `ignore_eos`.

    logprobs  report the log-probability of every token in the forward that accepted it
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
    """A request's raw counts, from which every rate is computed.

    num_tokens            useful tokens: generated before EOS, at most max_tokens
    num_forwards          NFE: forwards that its blocks took part in, store-only ones included
    num_store_forwards    those of them in which none of its blocks was being decoded (SingleBD's bubble)
    num_prefill_forwards  forwards that carried only its prompt, or repeated what a preemption undid; not in NFE
    decode_seconds        wall time of the steps counted in num_forwards
    num_cached_tokens     tokens of the prompt that the prefix cache held
    num_preemptions       how often its pages were taken for an older request
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

    logprobs  natural log-probability of each token in the forward that accepted it, where the request asked for it
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    counts: Counts
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step committed for one request: the new useful tokens, and the whole output if the request is done."""

    request_id: str
    new_tokens: tuple[int, ...]
    output: Output | None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One slot of a request in one step; for a canvas, one lane.

    block        index of the slot's block, from the beginning of the request's block grid
    state        name of the slot's `SlotState` in the forward, or `CANVAS_STATE`
    mask_ratio   share of the block that the forward saw masked
    accepted     positions that became tokens
    edited       tokens that were overwritten
    tokens       where the trace is detailed: the tokens after the step, -1 where masked
    confidences  likewise: the confidence of each token in the forward that accepted it last, 0 where masked
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
