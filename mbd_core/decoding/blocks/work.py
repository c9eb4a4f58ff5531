"""The optional parts of a step that a batch needs, beside the parts of every step."""

from dataclasses import dataclass, fields, replace

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling


@dataclass(frozen=True)
class StepWork:
    """The optional parts of a step that some batch row needs. A part that a row does not need leaves the row
    unchanged.

    draws      tokens are drawn (temperature above 0)
    truncates  they are drawn from a part of the vocabulary (top_k or top_p), which takes a sort
    scores     positions are ranked by a score other than confidence
    softens    filled positions are embedded as a mixture (DMax)
    revises    filled positions may change (T2T, DMax)
    quotas     several positions may be accepted by their rank
    by_parts   blocks are filled part by part, or begin with a carried token
    adapts     a LoRA adapter changes the forward
    adjusts    logits are changed before a token is chosen (penalties, biases, bans, min_p)
    tops       the likeliest tokens of each position are reported
    """

    draws: bool = False
    truncates: bool = False
    scores: bool = False
    softens: bool = False
    revises: bool = False
    quotas: bool = False
    by_parts: bool = False
    adapts: bool = False
    adjusts: bool = False
    tops: bool = False

    def covers(self, other: "StepWork") -> bool:
        """Whether every part that `other` has is done here too."""
        return all(getattr(self, f.name) >= getattr(other, f.name) for f in fields(StepWork))


WORK_NAMES = tuple(f.name for f in fields(StepWork))
ALL_WORK = StepWork(**dict.fromkeys(WORK_NAMES, True))


def work_of(decoding: DecodingConfig, sampling: Sampling, *, adapts: bool = False) -> StepWork:
    """The work that a request needs in each of its steps."""
    return StepWork(
        draws=sampling.draws,
        truncates=sampling.truncates,
        scores=decoding.ranks_by_score,
        softens=decoding.soft is not None,
        revises=decoding.revises,
        quotas=decoding.accepts_several,
        by_parts=decoding.by_parts,
        adapts=adapts,
    )


def work_of_request(request: Request) -> StepWork:
    work = work_of(request.decoding, request.sampling, adapts=request.adapter is not None)
    return replace(work, adjusts=request.adjusts, tops=request.top_logprobs > 0)
