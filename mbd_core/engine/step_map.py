"""Which forward wrote each position of a sequence's resident blocks, kept on the host beside its buffer row.

Shape legend: N slots, B block size.
"""

from dataclasses import replace

import numpy as np

from mbd_core.decoding.rollout import Edit, Rollout

OPEN = -1  # no forward has filled it


class StepMap:
    """The forwards of one sequence's slots. It moves as the slots do, and outlives a preemption as their row does.

    With `edits` it also keeps the tokens, and those that were overwritten. Positions that hold tokens of the prompt
    are in it too, with a number that nobody reads.
    """

    def __init__(self, num_slots: int, block_size: int, *, edits: bool = False) -> None:
        self._forward_NB = np.full((num_slots, block_size), OPEN, dtype=np.int64)
        self._tokens_NB = np.full_like(self._forward_NB, OPEN) if edits else None
        self._edits: list[Edit] = []  # by position, from the first that ever was in a slot
        self._num_taken = 0

    def update(self, tokens_NB: np.ndarray, masked_NB: np.ndarray, forward: int) -> None:
        """Forward number `forward` has left these tokens and masks; what it wrote gets its number."""
        if self._tokens_NB is not None:
            self._overwrite(self._tokens_NB, np.where(masked_NB, OPEN, tokens_NB).astype(np.int64), forward)
        self._forward_NB[~masked_NB & (self._forward_NB == OPEN)] = forward

    def _overwrite(self, old_NB: np.ndarray, new_NB: np.ndarray, forward: int) -> None:
        changed_NB = (old_NB != OPEN) & (new_NB != OPEN) & (old_NB != new_NB)
        places = (self._num_taken + np.flatnonzero(changed_NB)).tolist()
        written = zip(places, self._forward_NB[changed_NB].tolist(), old_NB[changed_NB].tolist(), strict=True)
        self._edits += [Edit(place, step, token) for place, step, token in written]
        self._forward_NB[changed_NB] = forward
        old_NB[:] = new_NB

    def mark(self, slot: int, offset: int, forward: int) -> None:
        """A position was filled before a forward: with number `forward`, or for 0 before all."""
        self._forward_NB[slot, offset] = forward

    def take(self, num_blocks: int) -> Rollout:
        """The steps and edits of the first blocks' positions, in order; those blocks leave the buffer."""
        steps = self._forward_NB[:num_blocks].ravel().tolist()
        written = Rollout(edits=tuple(self._edits)).without(self._num_taken)
        self._num_taken += len(steps)
        self._edits = [edit for edit in self._edits if edit.index >= self._num_taken]
        self._forward_NB = _slid(self._forward_NB, num_blocks)
        if self._tokens_NB is not None:
            self._tokens_NB = _slid(self._tokens_NB, num_blocks)
        return replace(written.cut((), len(steps), room=0), steps=tuple(steps))


def _slid(values_NB: np.ndarray, num_blocks: int) -> np.ndarray:
    """Without the first blocks, and open ones at the end."""
    return np.concatenate((values_NB[num_blocks:], np.full_like(values_NB[:num_blocks], OPEN)))
