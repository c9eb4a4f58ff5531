"""The Block Buffer of all running sequences at once: slots, their states, and how they move (paper Alg. 5).

    DUMMY -> ACTIVE -> TO_CACHE -> IN_CACHE

A DUMMY slot holds no block. A forward fills the block of an ACTIVE slot, and revises it if the request edits. A
TO_CACHE block is final, as are all blocks before it, and the next forward stores it; then it leaves the buffer
(IN_CACHE: its keys are in pages) and the other slots slide forward. With T2T a block usually skips TO_CACHE: the
forward that verifies it sees its final tokens, and so stores it.

`activate()` runs before a forward, `commit()` after it. Both are static-shape tensor work on buffers that are never
reallocated. The rules of a slot read the state before the step, in all slots.

Shape legend: R rows (sequences), N slots, B block size, A positions with logits.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.decoding.answers.slots import SlotState
from mbd_core.decoding.blocks.acceptance import (
    JETENGINE,
    LEFTMOST,
    Prediction,
    accept_by_entropy,
    accept_from_left,
    accept_m2t,
    leading,
    leftmost_part,
    revise,
)
from mbd_core.decoding.blocks.adjustments import Adjust, Adjustments
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.row_settings import RowSettings
from mbd_core.decoding.blocks.sampling import Draw
from mbd_core.decoding.blocks.work import ALL_WORK, StepWork


@dataclass(frozen=True)
class Commit:
    """The result of one step, on the buffer's device. Slots are counted before the slide.

    num_blocks_R    blocks that this step's forward stored and that have left the buffer
    tokens_RNB      all tokens after the step; the first `num_blocks_R` slots are committed
    masked_RNB      which of these positions are masked
    confidence_RNB  the confidence of each token in the forward that wrote it (with DMax: in the last forward)
    accepted_RN     the number of positions that this step filled
    edited_RN       the number of tokens that this step overwrote
    """

    num_blocks_R: Tensor
    tokens_RNB: Tensor
    masked_RNB: Tensor
    confidence_RNB: Tensor
    accepted_RN: Tensor
    edited_RN: Tensor


@dataclass(frozen=True)
class Rewritten:
    """The new contents of the rows `rows_R` (R,), whose slots the host has written anew.

    stored_RN  the final blocks whose tokens were final already in this step's forward
    """

    rows_R: Tensor
    tokens_RNB: Tensor
    masked_RNB: Tensor
    confidence_RNB: Tensor
    stored_RN: Tensor


@dataclass(frozen=True)
class Chosen:
    """Rows (R,) whose tokens the host has chosen. Their positions `accepted_RNB` become tokens; in the rows of
    `rewritten` tokens also move."""

    rows_R: Tensor
    accepted_RNB: Tensor
    rewritten: Rewritten | None = None


_PER_SLOT = (
    "tokens_RNB",
    "masked_RNB",
    "confidence_RNB",
    "weight_RNB",
    "state_RN",
    "num_steps_RN",
    "stability_RN",
)
_DERIVED = ("positions_RNB", "editable_RNB", "num_editable_RN")
_DUMMY, _ACTIVE, _TO_CACHE = int(SlotState.DUMMY), int(SlotState.ACTIVE), int(SlotState.TO_CACHE)


class BlockBuffer:
    """Fixed tensors for `num_rows` sequences of `num_slots` slots; in a row without a sequence every slot is DUMMY.

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
        adjustments: Adjustments | None = None,
    ) -> None:
        """`adjustments` are needed for requests that change logits."""
        self.adjustments = adjustments
        self.num_slots, self.block_size, self.mask_token_id = num_slots, block_size, mask_token_id
        slots, positions = (num_rows, num_slots), (num_rows, num_slots, block_size)
        self.tokens_RNB = torch.full(positions, mask_token_id, device=device)
        self.masked_RNB = torch.ones(positions, dtype=torch.bool, device=device)
        self.confidence_RNB = torch.zeros(positions, device=device)
        self.weight_RNB = torch.ones(positions, device=device)
        self.state_RN = torch.full(slots, _DUMMY, dtype=torch.int8, device=device)
        self.num_steps_RN = torch.zeros(slots, dtype=torch.int64, device=device)
        self.stability_RN = torch.ones(slots, dtype=torch.float64, device=device)
        self.settings = RowSettings(num_rows, device)
        self.positions_RNB = torch.zeros(positions, dtype=torch.int64, device=device)
        self.editable_RNB = torch.zeros(positions, dtype=torch.bool, device=device)
        self.num_editable_RN = torch.zeros(slots, dtype=torch.float64, device=device)
        self.max_blocks = num_slots
        self._max_blocks = torch.tensor([num_slots], device=device)  # `max_blocks` on the device
        self._eos_ids = eos_token_ids
        self._eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=device)
        self._slots = torch.arange(num_slots, device=device)
        self._offsets = torch.arange(block_size, device=device)
        self._heads: dict[int, BlockBuffer] = {}
        self._list_slot_tensors()
        self._derive()

    def _list_slot_tensors(self) -> None:
        """List the tensors that move with their slots, each with its value in an empty slot."""
        self._per_slot: list[tuple[Tensor, float]] = [
            (self.tokens_RNB, self.mask_token_id),
            (self.masked_RNB, True),
            (self.confidence_RNB, 0.0),
            (self.weight_RNB, 1.0),
            (self.state_RN, _DUMMY),
            (self.num_steps_RN, 0),
            (self.stability_RN, 1.0),
        ]

    def head(self, num_rows: int) -> "BlockBuffer":
        """The first `num_rows` rows as a buffer over the same memory."""
        if num_rows == len(self.state_RN):
            return self
        if num_rows in self._heads:
            return self._heads[num_rows]
        view = self._heads[num_rows] = copy.copy(self)
        for name in (*_PER_SLOT, *_DERIVED):
            setattr(view, name, getattr(self, name)[:num_rows])
        view.settings = self.settings.head(num_rows)
        view.adjustments = None if self.adjustments is None else self.adjustments.head(num_rows)
        view._list_slot_tensors()
        return view

    def _derive(self) -> None:
        """Compute the tensors that change only when rows slide: the absolute position of every token, whether it may
        be filled (after the prompt, within the token budget), and each slot's number of such positions."""
        settings = self.settings
        block = settings.first_block_R[:, None] + self._slots
        starts = settings.origin_R[:, None] + block * self.block_size
        torch.add(starts[..., None], self._offsets, out=self.positions_RNB)
        begin, end = settings.begin_R[:, None, None], settings.end_R[:, None, None]
        torch.logical_and(self.positions_RNB >= begin, self.positions_RNB < end, out=self.editable_RNB)
        self.num_editable_RN.copy_(self.editable_RNB.sum(-1))

    @property
    def resident_RN(self) -> Tensor:
        return self.state_RN != _DUMMY

    @property
    def active_RN(self) -> Tensor:
        return self.state_RN == _ACTIVE

    @property
    def open_RNB(self) -> Tensor:
        """The positions that a forward may fill: masked, editable, in an ACTIVE slot."""
        return self.masked_RNB & self.editable_RNB & self.active_RN[..., None]

    @property
    def asked_RNB(self) -> Tensor:
        """The positions that need logits, because a forward may fill or revise them. If the store of a block carries,
        its first position needs logits too: they predict the position after the block."""
        changes = self.masked_RNB | (self.settings.edits_R + self.settings.softens_R > 0)[:, None, None]
        asked_RNB = changes & self.editable_RNB & self.active_RN[..., None]
        asked_RNB[..., 0] |= self.carried_RN
        return asked_RNB

    @property
    def carried_RN(self) -> Tensor:
        """Slots whose store gives the token after their block: the last slot that a forward stores."""
        carried_RN = (self.state_RN == _TO_CACHE) & (self.settings.carries_R[:, None] > 0)
        carried_RN[:, :-1] &= ~carried_RN[:, 1:]
        return carried_RN

    @property
    def progress_RN(self) -> Tensor:
        """Filled share of each slot's editable positions, float64; 1 where nothing is editable."""
        num_open_RN = (self.masked_RNB & self.editable_RNB).sum(-1)
        return 1.0 - num_open_RN / self.num_editable_RN.clamp(min=1.0)

    def draw(self, at_A: Tensor | None, *, truncates: bool = True) -> Draw:
        """The inputs of drawing at places `at_A` of the flattened buffer (`None`: all places).

        `truncates` may be false if no row sets top_k or top_p: the vocabulary is then not sorted.
        """
        row_A, settings = self._row_of(at_A), self.settings
        return Draw(
            temperature_P=settings.temperature_R[row_A],
            top_p_P=settings.top_p_R[row_A],
            top_k_P=settings.top_k_R[row_A],
            seed_P=settings.seed_R[row_A],
            position_P=self._position_of(at_A),
            forward_P=settings.forward_R[row_A],
            truncates=truncates,
        )

    def adjust(self, at_A: Tensor | None) -> Adjust | None:
        """The changes of the rows' requests to the logits at places `at_A` of the flattened buffer (`None`: all)."""
        if self.adjustments is None:
            return None
        return self.adjustments.at(
            self._row_of(at_A),
            self._position_of(at_A),
            tokens_RS=self.tokens_RNB.flatten(1),
            masked_RS=self.masked_RNB.flatten(1),
            positions_RS=self.positions_RNB.flatten(1),
        )

    def fallback_at(self, at_A: Tensor | None) -> Tensor:
        """The rows' `FALLBACKS` numbers at places `at_A` of the flattened buffer (`None`: all places)."""
        return self.settings.fallback_R[self._row_of(at_A)]

    def _row_of(self, at_A: Tensor | None) -> Tensor:
        """The row of each place; for the sentinel of padding, one past the last place, the last row."""
        if at_A is None:
            at_A = torch.arange(self.masked_RNB.numel(), device=self.masked_RNB.device)
        return (at_A // (self.num_slots * self.block_size)).clamp(max=len(self.masked_RNB) - 1)

    def _position_of(self, at_A: Tensor | None) -> Tensor:
        """The position that each place predicts; for the sentinel, the position of the last place."""
        positions_RNB = self.positions_RNB.clone()
        positions_RNB[..., 0] += self.carried_RN * self.block_size
        positions = positions_RNB.flatten()
        return positions if at_A is None else positions[at_A.clamp(max=len(positions) - 1)]

    def join(self, row: int, request: Request) -> None:
        """Seat a request: slot 0 gets its boundary block, with the prompt's remainder, and becomes ACTIVE. A whole
        block is TO_CACHE."""
        self._clear(row)
        tokens = (*request.prompt, *request.committed)
        remainder = tokens[request.first_block_start(len(tokens)) :]
        if remainder:
            self.tokens_RNB[row, 0, : len(remainder)] = torch.tensor(remainder)
            self.masked_RNB[row, 0, : len(remainder)] = False
        is_whole = len(remainder) == self.block_size
        self.state_RN[row, 0] = _TO_CACHE if is_whole else _ACTIVE
        self.settings.write(row, request)
        if self.adjustments is not None and request.adjusts:
            ends, free = request.ends(self._eos_ids), len(request.prompt) + request.min_tokens
            length = len(request.prompt)
            self.adjustments.write(row, tokens, request.sampling, prompt_length=length, ends=ends, free=free)
        self._derive()

    def leave(self, row: int) -> None:
        """Free a row and clear its state."""
        self._clear(row)
        self._derive()

    @property
    def _state(self) -> tuple[Tensor, ...]:
        """The tensors that a step reads and changes; `_derive` computes the others from them."""
        adjustments = () if self.adjustments is None else self.adjustments.state
        return *(tensor for tensor, _ in self._per_slot), *self.settings.columns, *adjustments

    def save(self, row: int) -> list[Tensor]:
        """A copy of a row's state, for `restore`."""
        return [t[row].clone() for t in self._state]

    def restore(self, row: int, saved: list[Tensor]) -> None:
        """Write a saved state into any row."""
        for tensor, value in zip(self._state, saved, strict=True):
            tensor[row] = value
        if self.adjustments is not None:
            self.adjustments.mark(row)
        self._derive()

    def save_all(self) -> list[Tensor]:
        """A copy of all rows' state, for `restore_all`."""
        return [t.clone() for t in self._state]

    def restore_all(self, saved: list[Tensor]) -> None:
        for tensor, value in zip(self._state, saved, strict=True):
            tensor.copy_(value)
        self._derive()

    def hold_to(self, max_blocks: int) -> None:
        """From the next `activate()` on, rows of adaptive requests grow to `max_blocks` resident blocks at most.

        Resident blocks stay. A row may always have one block, and never more than its request's buffer size.
        """
        if max_blocks != self.max_blocks:
            self.max_blocks = max_blocks
            self._max_blocks.fill_(max_blocks)

    def activate(self) -> None:
        """DUMMY -> ACTIVE (Alg. 5 lines 4 to 8): at most one slot a row, the first DUMMY one.

        A row grows when its last ACTIVE block has progress > tau_add and stability > tau_stable, or when no block is
        ACTIVE. It never grows past its buffer size, which `hold_to` may lower, or its token budget, nor while a
        resident block has a generated EOS (Alg. 4 line 5).
        """
        settings, num_resident_R = self.settings, self.resident_RN.sum(-1)
        starts = settings.origin_R + (settings.first_block_R + num_resident_R) * self.block_size
        limit_R = torch.minimum(settings.limit_R, torch.maximum(settings.kept_R, self._max_blocks))
        room = (num_resident_R < limit_R) & (starts < settings.end_R)
        last_active = torch.where(self.active_RN, self._slots, -1).amax(-1)
        last = last_active.clamp(min=0)[:, None]
        progress = self.progress_RN.gather(1, last)[:, 0]
        stability = self.stability_RN.gather(1, last)[:, 0]
        wants = (last_active < 0) | ((progress > settings.tau_add_R) & (stability > settings.tau_stable_R))
        grows = wants & room & ~self._has_eos_R()
        self.state_RN.masked_fill_(grows[:, None] & (self._slots == num_resident_R[:, None]), _ACTIVE)

    def set_token(self, row: int, slot: int, offset: int, token: int) -> None:
        """Fill an open position with a token that is certain."""
        self.tokens_RNB[row, slot, offset] = token
        self.masked_RNB[row, slot, offset] = False
        self.confidence_RNB[row, slot, offset] = 1.0

    def close_complete(self, row: int) -> None:
        """Mark the row's leading complete blocks TO_CACHE: their inputs are final before the forward that follows."""
        final_N = leading(self._complete_RN[row])
        self.state_RN[row] = self.state_RN[row].masked_fill(final_N, _TO_CACHE)

    def commit(
        self,
        prediction: Prediction,
        work: StepWork = ALL_WORK,
        *,
        chosen: Chosen | None = None,
    ) -> Commit:
        """Accept and revise tokens, mark final blocks TO_CACHE, remove stored blocks, slide (Alg. 5 lines 10 to 25).

        Work that no row needs is skipped. In `chosen` rows the host has decided which positions are accepted.
        """
        settings, revises = self.settings, work.revises
        stored = self.state_RN == _TO_CACHE
        accepted = self._accept(prediction, work)
        if chosen is not None:
            accepted = torch.where(chosen.rows_R[:, None, None], chosen.accepted_RNB, accepted)
        written, rated, num_edited_RN = accepted, accepted, torch.zeros_like(self.num_steps_RN)
        if revises:
            active, was_complete = self.active_RN, self._complete_RN
            filled = ~self.masked_RNB & self.editable_RNB & active[..., None]
            edited = revise(prediction, self.tokens_RNB, filled, tau_R=settings.tau_t2t_R)
            written, num_edited_RN = accepted | edited, edited.sum(-1)
            rated = written | (settings.softens_R[:, None, None] > 0) & filled
            confirmed = filled & (prediction.token_RNB == self.tokens_RNB)
            self.stability_RN.copy_(torch.where(active, _share(confirmed.sum(-1), filled.sum(-1), empty=1.0), 1.0))
            self.num_steps_RN.add_(active & ((settings.softens_R[:, None] > 0) | was_complete))
        self.confidence_RNB.copy_(torch.where(rated, prediction.confidence_RNB, self.confidence_RNB))
        self.tokens_RNB.copy_(torch.where(written, prediction.token_RNB, self.tokens_RNB))
        self.masked_RNB.logical_and_(~accepted)

        num_accepted_RN = accepted.sum(-1)
        if chosen is not None and chosen.rewritten is not None:
            num_accepted_RN, num_edited_RN = self._rewrite(chosen.rewritten, num_accepted_RN, num_edited_RN)

        final = self._complete_RN
        if revises:
            changed = written.any(-1)
            settled = self._settled(final, was_complete, changed)
            stored = stored | (active & was_complete & ~changed & (settings.edits_R[:, None] > 0))
            final = (self.state_RN == _TO_CACHE) | settled
        if chosen is not None and chosen.rewritten is not None:
            stored = torch.where(chosen.rewritten.rows_R[:, None], chosen.rewritten.stored_RN, stored)
        final = leading(final)
        self.state_RN.masked_fill_(final, _TO_CACHE)
        if revises:
            self._mix_embeddings(active & ~final)
        settings.forward_R.add_(self.resident_RN.any(-1))

        commit = Commit(
            leading(stored).sum(-1),
            self.tokens_RNB.clone(),
            self.masked_RNB.clone(),
            self.confidence_RNB.double(),
            num_accepted_RN,
            num_edited_RN,
        )
        self._slide(commit.num_blocks_R)
        if work.by_parts:
            self._carry(prediction, commit.num_blocks_R)
        return commit

    def _carry(self, prediction: Prediction, num_blocks_R: Tensor) -> None:
        """Fill the first position of each row's first block, if it is open, with the token that the store of the block
        before predicted. If this completes the block, the block is final."""
        settings, last_R1 = self.settings, (num_blocks_R - 1).clamp(min=0)[:, None]
        tokens_R, masked_R = self.tokens_RNB[:, 0, 0], self.masked_RNB[:, 0, 0]
        confidence_R = self.confidence_RNB[:, 0, 0]
        fills_R = masked_R & self.editable_RNB[:, 0, 0] & (num_blocks_R > 0) & (settings.carries_R > 0)
        new_tokens_R = prediction.token_RNB[..., 0].gather(1, last_R1)[:, 0]
        new_confidence_R = prediction.confidence_RNB[..., 0].gather(1, last_R1)[:, 0]
        tokens_R.copy_(torch.where(fills_R, new_tokens_R, tokens_R))
        confidence_R.copy_(torch.where(fills_R, new_confidence_R, confidence_R))
        masked_R.logical_and_(~fills_R)
        self.state_RN[:, 0].masked_fill_(fills_R & self._complete_RN[:, 0], _TO_CACHE)

    def _rewrite(self, new: Rewritten, accepted_RN: Tensor, edited_RN: Tensor) -> tuple[Tensor, Tensor]:
        """Puts the host's writes into its rows.

        Returns the numbers (R, N) of filled and of changed positions; other rows keep the given numbers.
        """
        rows_RNB = new.rows_R[:, None, None]
        filled = self.masked_RNB & ~new.masked_RNB
        changed = ~self.masked_RNB & ~new.masked_RNB & (self.tokens_RNB != new.tokens_RNB)
        self.tokens_RNB.copy_(torch.where(rows_RNB, new.tokens_RNB, self.tokens_RNB))
        self.masked_RNB.copy_(torch.where(rows_RNB, new.masked_RNB, self.masked_RNB))
        self.confidence_RNB.copy_(torch.where(rows_RNB, new.confidence_RNB, self.confidence_RNB))
        rows_RN = new.rows_R[:, None]
        return torch.where(rows_RN, filled.sum(-1), accepted_RN), torch.where(rows_RN, changed.sum(-1), edited_RN)

    @property
    def _complete_RN(self) -> Tensor:
        return self.resident_RN & ~(self.masked_RNB & self.editable_RNB).any(-1)

    def _accept(self, prediction: Prediction, work: StepWork) -> Tensor:
        """Open positions that become tokens. The first slot, and slots after semi-complete slots, may fall back."""
        settings, open_RNB = self.settings, self.open_RNB
        if work.by_parts:
            open_RNB = leftmost_part(open_RNB, settings.sub_block_R)
        semi_RN = self.progress_RN[:, :-1] >= settings.tau_semi_R[:, None]
        gate_RN = torch.nn.functional.pad(semi_RN, (1, 0), value=True)
        accepted = accept_m2t(
            prediction,
            open_RNB,
            gate_RN=gate_RN,
            tau_R=settings.tau_m2t_R,
            quota_R=settings.quota_R if work.quotas else None,
            leftmost_R=settings.fallback_R == LEFTMOST,
        )
        if work.quotas:
            by_entropy = accept_by_entropy(
                prediction.score_RNB,
                open_RNB,
                gate_RN=gate_RN,
                gamma_R=settings.gamma_R,
                jetengine_R=settings.entropy_rule_R == JETENGINE,
            )
            accepted = torch.where(settings.entropy_rule_R[:, None, None] > 0, by_entropy, accepted)
        if work.revises:
            from_left = accept_from_left(
                prediction.confidence_RNB, open_RNB, gate_RN=gate_RN, tau_R=settings.tau_m2t_R
            )
            accepted = torch.where(settings.softens_R[:, None, None] > 0, from_left, accepted)
        return accepted

    def _settled(self, complete: Tensor, was_complete: Tensor, changed: Tensor) -> Tensor:
        """ACTIVE slots (R, N) whose block is complete and needs no more revision.

        Under T2T such a block has had `max_edits` forwards without a mask, and the last one edited it. A block that a
        forward leaves unchanged is not among them, because that same forward stores it.
        """
        settings = self.settings
        edits, softens = settings.edits_R[:, None] > 0, settings.softens_R[:, None] > 0
        capped = was_complete & changed & (self.num_steps_RN >= settings.max_edits_R[:, None])
        confident = (self.confidence_RNB >= settings.stop_confidence_R[:, None, None]) | ~self.editable_RNB
        steady = confident.all(-1) | ~changed | (self.num_steps_RN >= self.block_size)
        return complete & torch.where(edits, capped, ~softens | steady)

    def _mix_embeddings(self, active: Tensor) -> None:
        """DMax: the next forward mixes the embeddings of filled positions in `active` slots (R, N) by their
        confidence. All other tokens are hard, tokens of final blocks included, so that pages hold hard tokens."""
        mixed = (self.settings.softens_R[:, None] > 0) & active
        mixed = mixed[..., None] & self.editable_RNB & ~self.masked_RNB
        self.weight_RNB.copy_(torch.where(mixed, self.confidence_RNB, 1.0))

    def _slide(self, count_R: Tensor) -> None:
        """Move each row's slots forward by `count_R`; the slots at its end become empty."""
        source = self._slots + count_R[:, None]
        empties = source >= self.num_slots
        source = source.clamp(max=self.num_slots - 1)
        for tensor, empty in self._per_slot:
            is_deep = tensor.ndim == 3
            moved = tensor.gather(1, source[..., None].expand_as(tensor) if is_deep else source)
            tensor.copy_(moved.masked_fill_(empties[..., None] if is_deep else empties, empty))
        self.settings.first_block_R.add_(count_R)
        self._derive()

    def _has_eos_R(self) -> Tensor:
        """Rows with a generated EOS in a resident block, where an EOS ends the request."""
        is_eos = (self.tokens_RNB[..., None] == self._eos).any(-1)
        generated = is_eos & ~self.masked_RNB & self.editable_RNB & self.resident_RN[..., None]
        return generated.any(-1).any(-1) & (self.settings.eos_stops_R > 0)

    def _clear(self, row: int) -> None:
        for tensor, empty in self._per_slot:
            tensor[row] = empty
        self.settings.clear(row)
        if self.adjustments is not None:
            self.adjustments.clear(row)


def _share(part: Tensor, whole: Tensor, *, empty: float) -> Tensor:
    """`part / whole` in float64, `empty` where `whole` is 0."""
    return torch.where(whole > 0, part / whole.double().clamp(min=1.0), empty)
