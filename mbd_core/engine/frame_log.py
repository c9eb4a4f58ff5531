"""What changed in a sequence's slots from one forward to the next, kept on the host beside its buffer row.

Shape legend: N slots, B block size.
"""

import numpy as np

from mbd_core.decoding.frame import Frame, FrameSlot
from mbd_core.decoding.request import Request
from mbd_core.decoding.slot_state import SlotState


class FrameLog:
    """The slots of one sequence as its last forward left them. They move as the slots do, and outlive a preemption as
    their row does."""

    def __init__(self, request: Request, block_size: int) -> None:
        shape = (request.decoding.buffer_size, block_size)
        self._request, self._num_slots = request, shape[0]
        self._tokens_NB, self._masked_NB = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=bool)
        self._offsets_NB = np.arange(shape[0] * shape[1]).reshape(shape)
        self._end = len(request.prompt) + request.max_tokens
        self._fixed = np.zeros(self._end, dtype=bool)  # by position: no forward fills or changes these
        self._fixed[: len(request.prompt) + len(request.committed)] = True
        for index, token in enumerate(request.template):
            self._fixed[len(request.prompt) + index] |= token is not None

    def frame(
        self,
        states_N: np.ndarray,
        tokens_NB: np.ndarray,
        masked_NB: np.ndarray,
        *,
        num_stored: int,
        start: int,
        forward: int,
    ) -> Frame:
        """The frame of forward number `forward`, which has left these tokens and masks in the slots from position
        `start` on, and stored the first `num_stored` of their blocks."""
        size, n = masked_NB.shape[-1], self._num_slots
        tokens_NB, masked_NB = tokens_NB[:n].astype(np.int64), masked_NB[:n].copy()
        positions_NB = start + self._offsets_NB
        inside_NB = positions_NB < self._end
        free_NB = inside_NB & ~self._fixed[np.minimum(positions_NB, self._end - 1)]
        filled_NB = free_NB & ~masked_NB
        accepted_NB = filled_NB & self._masked_NB
        edited_NB = filled_NB & ~self._masked_NB & (tokens_NB != self._tokens_NB)
        self._keep(tokens_NB, masked_NB, num_stored)
        slots = []
        for slot in np.flatnonzero(states_N[:n] != SlotState.DUMMY).tolist():
            known = zip(tokens_NB[slot].tolist(), masked_NB[slot].tolist(), strict=True)
            state = SlotState.IN_CACHE if slot < num_stored else SlotState(int(states_N[slot]))
            slots.append(
                FrameSlot(
                    state=state.name,
                    tokens=tuple(None if m else t for t, m in known)[: min(size, int(inside_NB[slot].sum()))],
                    accepted=tuple(np.flatnonzero(accepted_NB[slot]).tolist()),
                    edited=tuple(np.flatnonzero(edited_NB[slot]).tolist()),
                )
            )
        return Frame(forward=forward, position=start - len(self._request.prompt), num_slots=n, slots=tuple(slots))

    def _keep(self, tokens_NB: np.ndarray, masked_NB: np.ndarray, num_stored: int) -> None:
        """What the next forward is compared with: stored blocks leave, the others move to the front."""
        self._tokens_NB[:], self._masked_NB[:] = 0, True
        left = self._num_slots - num_stored
        self._tokens_NB[:left], self._masked_NB[:left] = tokens_NB[num_stored:], masked_NB[num_stored:]
