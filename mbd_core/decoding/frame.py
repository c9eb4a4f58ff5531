"""What one forward left in a request's Block Buffer: provisional, unlike what is committed."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FrameSlot:
    """A slot that held a block in the forward.

    state     the name of the `SlotState` that the forward saw; "IN_CACHE" if it stored the block, which has left the
              buffer then
    tokens    the block after the forward, `None` where it is masked; positions past the request's budget are left out
    accepted  offsets of the tokens that this forward filled
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
