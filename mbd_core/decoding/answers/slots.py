"""A request's slots after a forward: the states of a slot, frames for clients, and traces for studies."""

from dataclasses import dataclass
from enum import IntEnum


class SlotState(IntEnum):
    """DUMMY -> ACTIVE -> TO_CACHE -> IN_CACHE; `block_buffer.py` says when a slot's state changes.

    No slot of a buffer is IN_CACHE: a stored block frees its slot.
    """

    DUMMY = 0
    ACTIVE = 1
    TO_CACHE = 2
    IN_CACHE = 3


CANVAS_STATE = "CANVAS"  # the state in traces of a canvas's blocks, because a canvas has no slots


@dataclass(frozen=True, kw_only=True)
class FrameSlot:
    """A slot that held a block in the forward.

    state     the name of the `SlotState` that the forward saw; "IN_CACHE" if the forward stored the block, which then
              left the buffer
    tokens    the block after the forward, `None` where it is masked; positions past the request's budget are left out
    accepted  offsets of the tokens that this forward filled, without a token that the previous block's store gave
    edited    offsets of the tokens that this forward overwrote
    verdict   `None` unless the decoding verifies its drafts
    """

    state: str
    tokens: tuple[int | None, ...]
    accepted: tuple[int, ...]
    edited: tuple[int, ...]
    verdict: "DraftVerdict | None" = None


@dataclass(frozen=True, kw_only=True)
class DraftVerdict:
    """A forward's verdict on the draft of one block.

    drafted    for each offset, the token that waits for a judgement after the forward; `None` if none waits
    judged     number of drafted tokens that the forward judged
    confirmed  offsets of the judged tokens that it accepted
    refused    offsets of the drafted tokens that it refused and replaced by its own; judged tokens after a refused
               token are dropped
    """

    drafted: tuple[int | None, ...]
    judged: int = 0
    confirmed: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedSlot:
    """A block of a decoder that plans its rows, as a forward left it: a slot of a Block Buffer.

    start        position of the block's first token
    frame        the slot as clients see it, with all tokens of the block
    seen         the slot's state in the forward; `frame.state` is "IN_CACHE" if the forward stored the block
    confidences  each token's confidence in the forward that wrote it, 0 where masked
    mask_ratio   share of the block's positions that were masked before the forward
    """

    start: int
    frame: FrameSlot
    seen: SlotState
    confidences: tuple[float, ...]
    mask_ratio: float


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A request's slots after one forward.

    forward    the forward's number among the request's forwards, from 1, as in a step map
    position   where the first slot's block begins, counted from the answer's first token; negative if this block
               also holds the prompt's end
    num_slots  the request's buffer size; `slots` leaves out slots without a block
    """

    forward: int
    position: int
    num_slots: int
    slots: tuple[FrameSlot, ...]


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One slot of a request in one step. For a canvas, `slot` is a lane.

    block        index of the slot's block, from the beginning of the request's block grid
    state        name of the slot's `SlotState` in the forward, or `CANVAS_STATE`
    mask_ratio   share of the block's positions that were masked before the forward
    accepted     number of positions that became tokens
    edited       number of tokens that were overwritten
    judged       number of drafted tokens that the forward judged; it accepted `confirmed` of them
    tokens       in a detailed trace: the tokens after the step, -1 where masked
    confidences  in a detailed trace: the confidence of each token in the forward that wrote it (with DMax: in the last
                 forward), 0 where masked
    draft        in a detailed trace of a decoding that verifies drafts: the tokens that wait for a judgement, -1 where
                 none waits
    """

    request_id: str
    step: int
    slot: int
    block: int
    state: str
    mask_ratio: float
    accepted: int
    edited: int = 0
    judged: int = 0
    confirmed: int = 0
    tokens: tuple[int, ...] | None = None
    confidences: tuple[float, ...] | None = None
    draft: tuple[int, ...] | None = None
