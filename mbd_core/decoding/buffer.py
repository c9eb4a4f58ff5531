"""The Block Buffer of all running sequences at once: slots, their states, and how they move (paper Alg. 5).

    DUMMY -> ACTIVE -> TO_CACHE -> IN_CACHE

A DUMMY slot waits. An ACTIVE one is being filled. A TO_CACHE one is final, as are all before it, and the next forward
stores it; then it leaves (IN_CACHE: it lives in pages) and the buffer slides. `activate()` runs before a forward,
`commit()` after it; both are static-shape tensor work, and every slot of a step reads the state before the step.

Shape legend: R rows (sequences), N slots, B block size.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from mbd_core.decoding.accept import Prediction, accept_m2t
from mbd_core.types import Request


class SlotState(IntEnum):
    DUMMY = 0
    ACTIVE = 1
    TO_CACHE = 2
    IN_CACHE = 3


@dataclass(frozen=True)
class Commit:
    """What one step did, on the buffer's device.

    num_blocks_R  blocks that this step's forward stored and that have left the buffer
    tokens_RNB    the buffer before it slid; the first `num_blocks_R` slots are the committed tokens
    accepted_RN   positions filled by this step, by slot before the slide
    """

    num_blocks_R: Tensor
    tokens_RNB: Tensor
    accepted_RN: Tensor


class BlockBuffer:
    """Fixed tensors for `num_rows` sequences of `num_slots` slots; a row without a sequence is all DUMMY.

    Masked is a boolean beside the tokens, never "token == mask id": a prompt may contain the mask token's text.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        num_slots: int,
        block_size: int,
        mask_token_id: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.num_slots, self.block_size, self.mask_token_id = num_slots, block_size, mask_token_id
        shape = (num_rows, num_slots)
        self.tokens_RNB = torch.full((*shape, block_size), mask_token_id, device=device)
        self.masked_RNB = torch.ones((*shape, block_size), dtype=torch.bool, device=device)
        self.state_RN = torch.full(shape, int(SlotState.DUMMY), dtype=torch.int8, device=device)
        self.first_block_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.begin_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.end_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.limit_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.quota_R = torch.ones(num_rows, dtype=torch.int64, device=device)
        self.leftmost_R = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.eos_stops_R = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.tau_add_R = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self.tau_semi_R = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self.tau_m2t_R = torch.zeros(num_rows, dtype=torch.float64, device=device)
        self._eos = torch.tensor(eos_token_ids, device=device)
        self._slots = torch.arange(num_slots, device=device)
        self._offsets = torch.arange(block_size, device=device)

    @property
    def positions_RNB(self) -> Tensor:
        """Absolute positions of every slot's tokens."""
        block = self.first_block_R[:, None] + self._slots
        return block[..., None] * self.block_size + self._offsets

    @property
    def editable_RNB(self) -> Tensor:
        """Positions the decoder may fill: behind the prompt, before the end of the token budget."""
        positions = self.positions_RNB
        return (positions >= self.begin_R[:, None, None]) & (positions < self.end_R[:, None, None])

    @property
    def resident_RN(self) -> Tensor:
        return self.state_RN != SlotState.DUMMY

    @property
    def active_RN(self) -> Tensor:
        return self.state_RN == SlotState.ACTIVE

    @property
    def open_RNB(self) -> Tensor:
        """Positions a forward may fill: masked, editable, in an ACTIVE slot."""
        return self.masked_RNB & self.editable_RNB & self.active_RN[..., None]

    @property
    def progress_RN(self) -> Tensor:
        """Filled share of each slot's editable positions, float64; 1 where nothing is editable."""
        editable = self.editable_RNB
        total = editable.sum(-1).double()
        left = (self.masked_RNB & editable).sum(-1).double()
        return torch.where(total > 0, 1.0 - left / total.clamp(min=1.0), 1.0)

    def join(self, row: int, request: Request) -> None:
        """Seat a request: its boundary block, with the prompt's remainder, becomes slot 0 and is ACTIVE at once."""
        config, length = request.decoding, len(request.prompt)
        boundary = length // self.block_size
        remainder = request.prompt[boundary * self.block_size :]
        self._clear(row)
        if remainder:
            self.tokens_RNB[row, 0, : len(remainder)] = torch.tensor(remainder)
            self.masked_RNB[row, 0, : len(remainder)] = False
        self.state_RN[row, 0] = SlotState.ACTIVE
        self.first_block_R[row] = boundary
        self.begin_R[row] = length
        self.end_R[row] = length + request.max_tokens
        self.limit_R[row] = config.buffer_size
        self.quota_R[row] = config.tokens_per_step
        self.leftmost_R[row] = config.fallback == "leftmost"
        self.eos_stops_R[row] = not request.ignore_eos
        self.tau_add_R[row] = config.tau_add
        self.tau_semi_R[row] = config.tau_semi
        self.tau_m2t_R[row] = config.tau_m2t

    def leave(self, row: int) -> None:
        """Free a row; nothing of its sequence stays."""
        self._clear(row)
        self.limit_R[row] = 0

    def activate(self) -> None:
        """DUMMY -> ACTIVE (Alg. 5 lines 4 to 8): at most one slot a row, the first DUMMY one.

        A row grows when its last ACTIVE block has progress > tau_add, or when no block is ACTIVE; never past its
        buffer size or its token budget, and not while an EOS stands in a resident block (Alg. 4 line 5).
        """
        active = self.active_RN
        num_resident_R = self.resident_RN.sum(-1)
        last_active = torch.where(active, self._slots, -1).amax(-1)
        progress = self.progress_RN.gather(1, last_active.clamp(min=0)[:, None])[:, 0]
        wants = (last_active < 0) | (progress > self.tau_add_R)
        starts = (self.first_block_R + num_resident_R) * self.block_size
        room = (num_resident_R < self.limit_R) & (starts < self.end_R)
        grows = wants & room & ~self._eos_seen_R()
        chosen = grows[:, None] & (self._slots == num_resident_R[:, None])
        self.state_RN.masked_fill_(chosen, int(SlotState.ACTIVE))

    def commit(self, prediction: Prediction) -> Commit:
        """Accept tokens, mark final blocks TO_CACHE, let the stored ones go and slide (Alg. 5 lines 10 to 25)."""
        stored_RN = self.state_RN == SlotState.TO_CACHE
        before = self.progress_RN
        ready = torch.ones_like(before[:, :1], dtype=torch.bool)
        semi = before[:, :-1] >= self.tau_semi_R[:, None]
        accepted = accept_m2t(
            prediction.confidence_RNB,
            self.open_RNB,
            gate_RN=torch.cat((ready, semi), dim=1),
            tau_R=self.tau_m2t_R,
            quota_R=self.quota_R,
            leftmost_R=self.leftmost_R,
        )
        self.tokens_RNB = torch.where(accepted, prediction.token_RNB, self.tokens_RNB)
        self.masked_RNB = self.masked_RNB & ~accepted

        complete = self.resident_RN & ~(self.masked_RNB & self.editable_RNB).any(-1)
        final = complete.long().cumprod(-1).bool()
        self.state_RN = self.state_RN.masked_fill(final, int(SlotState.TO_CACHE))

        done = Commit(stored_RN.sum(-1), self.tokens_RNB, accepted.sum(-1))
        self._slide(done.num_blocks_R)
        return done

    def _slide(self, count_R: Tensor) -> None:
        source = self._slots + count_R[:, None]
        fresh = source >= self.num_slots
        source = source.clamp(max=self.num_slots - 1)
        wide = source[..., None].expand_as(self.tokens_RNB)
        self.tokens_RNB = self.tokens_RNB.gather(1, wide).masked_fill(fresh[..., None], self.mask_token_id)
        self.masked_RNB = self.masked_RNB.gather(1, wide) | fresh[..., None]
        self.state_RN = self.state_RN.gather(1, source).masked_fill(fresh, int(SlotState.DUMMY))
        self.first_block_R = self.first_block_R + count_R

    def _eos_seen_R(self) -> Tensor:
        is_eos = (self.tokens_RNB[..., None] == self._eos).any(-1)
        standing = is_eos & ~self.masked_RNB & self.editable_RNB & self.resident_RN[..., None]
        return standing.flatten(1).any(-1) & self.eos_stops_R

    def _clear(self, row: int) -> None:
        self.tokens_RNB[row] = self.mask_token_id
        self.masked_RNB[row] = True
        self.state_RN[row] = SlotState.DUMMY
        self.first_block_R[row] = 0
        self.begin_R[row] = 0
        self.end_R[row] = 0
