"""The states of a slot, for the Block Buffer and for whoever reads a trace of it."""

from enum import IntEnum


class SlotState(IntEnum):
    """Where a slot stands in DUMMY -> ACTIVE -> TO_CACHE -> IN_CACHE (`block_buffer.py` says when it moves).

    A buffer never holds IN_CACHE: the slot of a block that was stored is free again.
    """

    DUMMY = 0
    ACTIVE = 1
    TO_CACHE = 2
    IN_CACHE = 3


CANVAS_STATE = "CANVAS"  # in a trace, in place of a slot's state: a block of a canvas, which has no slots
