"""In which forward each position of a sequence's resident blocks was filled, kept on the host beside its buffer row.

Shape legend: N slots, B block size.
"""

import numpy as np

OPEN = -1  # no forward has filled it


class StepMap:
    """The forwards of one sequence's slots. It moves as the slots do, and outlives a preemption as their row does.

    Positions that hold tokens of the prompt are in it too, with a number that nobody reads.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._forward_NB = np.full((num_slots, block_size), OPEN, dtype=np.int64)

    def update(self, masked_NB: np.ndarray, forward: int) -> None:
        """Forward number `forward` has left these positions masked; what it filled gets its number."""
        self._forward_NB[~masked_NB & (self._forward_NB == OPEN)] = forward

    def mark(self, slot: int, offset: int, forward: int) -> None:
        """A position was filled before a forward: with number `forward`, or for 0 before all."""
        self._forward_NB[slot, offset] = forward

    def take(self, num_blocks: int) -> list[int]:
        """The numbers of the first blocks' positions, in order; those blocks leave the buffer."""
        taken: list[int] = self._forward_NB[:num_blocks].ravel().tolist()
        self._forward_NB = np.concatenate(
            (self._forward_NB[num_blocks:], np.full_like(self._forward_NB[:num_blocks], OPEN))
        )
        return taken
