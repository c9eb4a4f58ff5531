"""The states of a slot, in the Block Buffer and in traces."""

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
