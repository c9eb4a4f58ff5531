"""Logs of one sequence's slots on the host: the forward that wrote each position, its likeliest tokens, the changes.

A log moves with the slots, and outlives a preemption together with their saved row.

Shape legend: N slots, B block size, K tokens.
"""

import math
from dataclasses import replace

import numpy as np

from mbd_core.decoding.answers.piece import Edit, TopTokens
from mbd_core.decoding.answers.slots import Frame, FrameSlot, SlotState
from mbd_core.decoding.blocks.request import Request

OPEN = -1  # the forward, or the token, of a position that no forward has filled


class StepMap:
    """The forwards that wrote the positions of one sequence's slots.

    With `edits` it also keeps the tokens and the overwritten tokens. Positions that hold tokens of the prompt are in
    it too, with a number that is not read.
    """

    def __init__(self, num_slots: int, block_size: int, *, edits: bool = False) -> None:
        self._forward_NB = np.full((num_slots, block_size), OPEN, dtype=np.int64)
        self._tokens_NB = np.full_like(self._forward_NB, OPEN) if edits else None
        self._edits: list[Edit] = []  # by position, from the first position of slot 0

    def update(self, tokens_NB: np.ndarray, masked_NB: np.ndarray, forward: int) -> None:
        """Records the tokens and masks after forward `forward`; positions that it wrote get its number."""
        if self._tokens_NB is not None:
            self._overwrite(self._tokens_NB, np.where(masked_NB, OPEN, tokens_NB).astype(np.int64), forward)
        self._forward_NB[~masked_NB & (self._forward_NB == OPEN)] = forward

    def _overwrite(self, old_NB: np.ndarray, new_NB: np.ndarray, forward: int) -> None:
        changed_NB = (old_NB != OPEN) & (new_NB != OPEN) & (old_NB != new_NB)
        places = np.flatnonzero(changed_NB).tolist()
        edits = zip(places, self._forward_NB[changed_NB].tolist(), old_NB[changed_NB].tolist(), strict=True)
        self._edits += [Edit(place, step, token) for place, step, token in edits]
        self._forward_NB[changed_NB] = forward
        old_NB[:] = new_NB

    def mark(self, slot: int, offset: int, forward: int) -> None:
        """Marks a position that was filled before forward `forward`, or before all forwards if it is 0."""
        self._forward_NB[slot, offset] = forward

    def carry(self, forward: int) -> None:
        """Marks the position after the stored blocks, if it was open: their store filled it."""
        if self._forward_NB[0, 0] == OPEN:
            self._forward_NB[0, 0] = forward

    def take(self, num_blocks: int) -> tuple[tuple[int, ...], tuple[Edit, ...]]:
        """The steps and edits of the first blocks' positions, in order; those blocks leave the buffer."""
        steps = tuple(self._forward_NB[:num_blocks].ravel().tolist())
        edits = tuple(edit for edit in self._edits if edit.index < len(steps))
        self._edits = [replace(e, index=e.index - len(steps)) for e in self._edits if e.index >= len(steps)]
        self._forward_NB = _slide(self._forward_NB, num_blocks)
        if self._tokens_NB is not None:
            self._tokens_NB = _slide(self._tokens_NB, num_blocks)
        return steps, edits


class TopLog:
    """The likeliest tokens of each position of one sequence's slots, in the forward whose log-probability is reported
    for its token."""

    def __init__(self, request: Request, block_size: int) -> None:
        shape = (request.decoding.buffer_size, block_size)
        self._number, self._softens = request.top_logprobs, request.decoding.soft is not None
        self._tokens_NB = np.full(shape, OPEN, dtype=np.int64)
        self._tops_NB2K = np.full((*shape, 2), -1.0)
        self._first_tops_N2K = self._tops_NB2K[:, 0]
        self._is_carried = False  # the store before filled the first position, and its tops are that forward's

    def update(
        self, states_N: np.ndarray, tokens_NB: np.ndarray, masked_NB: np.ndarray, tops_NB2K: np.ndarray
    ) -> None:
        """Records the tokens and masks after a forward, and its likeliest tokens."""
        if self._tops_NB2K.shape != tops_NB2K.shape:
            self._tops_NB2K = np.full(tops_NB2K.shape, -1.0)
        tokens_NB = np.where(masked_NB, OPEN, tokens_NB).astype(np.int64)
        rated_NB = ~masked_NB & (tokens_NB != self._tokens_NB)
        rated_NB[0, 0] &= not self._is_carried
        if self._softens:
            rated_NB |= ~masked_NB & (states_N == SlotState.ACTIVE)[:, None]
        self._tops_NB2K[rated_NB] = tops_NB2K[rated_NB]
        self._tokens_NB, self._first_tops_N2K, self._is_carried = tokens_NB, tops_NB2K[:, 0], False

    def carry(self, num_blocks: int) -> None:
        """Records the likeliest tokens of the position after the stored blocks, if it was open: the last forward
        predicted it in the place of the last block's first position."""
        if self._tokens_NB[0, 0] == OPEN:
            self._tops_NB2K[0, 0], self._is_carried = self._first_tops_N2K[num_blocks - 1], True

    def take(self, num_blocks: int) -> list[TopTokens]:
        """The likeliest tokens of the first blocks' positions, in order; these blocks leave the buffer."""
        flat = self._tops_NB2K[:num_blocks].reshape(-1, self._tops_NB2K.shape[-1])
        ids, values = np.split(flat, 2, axis=1)
        self._tokens_NB = _slide(self._tokens_NB, num_blocks)
        self._tops_NB2K = np.concatenate((self._tops_NB2K[num_blocks:], self._tops_NB2K[:num_blocks]))
        return [
            tuple((int(i), v) for i, v in zip(*each, strict=True) if i >= 0 and v > -math.inf)
            for each in zip(ids[:, : self._number].tolist(), values[:, : self._number].tolist(), strict=True)
        ]


def _slide(values_NB: np.ndarray, num_blocks: int) -> np.ndarray:
    """The values without the first blocks, with open blocks at the end."""
    return np.concatenate((values_NB[num_blocks:], np.full_like(values_NB[:num_blocks], OPEN)))


class FrameLog:
    """The slots of one sequence as its last forward left them."""

    def __init__(self, request: Request, block_size: int) -> None:
        shape = (request.decoding.buffer_size, block_size)
        self._request, self._num_slots = request, shape[0]
        self._tokens_NB, self._masked_NB = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=bool)
        self._offsets_NB = np.arange(shape[0] * shape[1]).reshape(shape)
        self._end = len(request.prompt) + request.max_tokens
        self._is_fixed = np.zeros(self._end, dtype=bool)  # by position: no forward fills or changes these
        self._is_fixed[: len(request.prompt) + len(request.committed)] = True
        for index, token in enumerate(request.template):
            self._is_fixed[len(request.prompt) + index] |= token is not None

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
        """The frame of forward `forward`: tokens and masks after it, in the slots from position `start` on. The
        forward stored the first `num_stored` of their blocks."""
        size, n = masked_NB.shape[-1], self._num_slots
        tokens_NB, masked_NB = tokens_NB[:n].astype(np.int64), masked_NB[:n].copy()
        positions_NB = start + self._offsets_NB
        inside_NB = positions_NB < self._end
        free_NB = inside_NB & ~self._is_fixed[np.minimum(positions_NB, self._end - 1)]
        filled_NB = free_NB & ~masked_NB
        accepted_NB = filled_NB & self._masked_NB
        edited_NB = filled_NB & ~self._masked_NB & (tokens_NB != self._tokens_NB)
        self._keep(tokens_NB, masked_NB, num_stored)
        next_position = start + num_stored * size
        if num_stored and self._request.carries and next_position < self._end:
            self._is_fixed[next_position] = True
        slots = []
        for slot in np.flatnonzero(states_N[:n] != SlotState.DUMMY).tolist():
            pairs = zip(tokens_NB[slot].tolist(), masked_NB[slot].tolist(), strict=True)
            state = SlotState.IN_CACHE if slot < num_stored else SlotState(int(states_N[slot]))
            slots.append(
                FrameSlot(
                    state=state.name,
                    tokens=tuple(None if m else t for t, m in pairs)[: min(size, int(inside_NB[slot].sum()))],
                    accepted=tuple(np.flatnonzero(accepted_NB[slot]).tolist()),
                    edited=tuple(np.flatnonzero(edited_NB[slot]).tolist()),
                )
            )
        return Frame(forward=forward, position=start - len(self._request.prompt), num_slots=n, slots=tuple(slots))

    def _keep(self, tokens_NB: np.ndarray, masked_NB: np.ndarray, num_stored: int) -> None:
        """Keeps the slots for comparison with the next forward: stored blocks leave, the others move to the front."""
        self._tokens_NB[:], self._masked_NB[:] = 0, True
        num_left = self._num_slots - num_stored
        self._tokens_NB[:num_left], self._masked_NB[:num_left] = tokens_NB[num_stored:], masked_NB[num_stored:]
