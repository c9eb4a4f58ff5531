"""The Block Buffer of all running sequences at once: slots, their states, and how they move (paper Alg. 5).

    DUMMY -> ACTIVE -> TO_CACHE -> IN_CACHE

A DUMMY slot waits. An ACTIVE one is being filled, and revised where the request edits. A TO_CACHE one is final, as are
all before it, and the next forward stores it; then it leaves (IN_CACHE: it lives in pages) and the buffer slides. With
T2T a block usually skips TO_CACHE: the forward that verified it saw its final tokens, so it was stored by that.

`activate()` runs before a forward, `commit()` after it; both are static-shape tensor work on buffers that are never
reallocated, and every slot of a step reads the state before the step.

Shape legend: R rows (sequences), N slots, B block size, A positions asked for.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.decoding.acceptance import FALLBACKS, LEFTMOST, Prediction, accept_from_left, accept_m2t, revise
from mbd_core.decoding.request import Request
from mbd_core.decoding.sampling import Draw
from mbd_core.decoding.slot_state import SlotState


@dataclass(frozen=True)
class Commit:
    """What one step did, on the buffer's device.

    num_blocks_R    blocks that this step's forward stored and that have left the buffer
    tokens_RNB      the buffer before it slid; the first `num_blocks_R` slots are the committed tokens
    masked_RNB      which of them are still masked
    confidence_RNB  the confidence at which each token was accepted last
    accepted_RN     positions filled by this step, by slot before the slide
    edited_RN       tokens overwritten by this step
    """

    num_blocks_R: Tensor
    tokens_RNB: Tensor
    masked_RNB: Tensor
    confidence_RNB: Tensor
    accepted_RN: Tensor
    edited_RN: Tensor


# A row's settings, one column each, so that seating a request is two copies to the device.
_WHOLE = (
    "first_block", "origin", "begin", "end", "limit", "quota", "fallback", "eos_stops", "edits", "max_edits",
    "softens", "top_k", "seed", "forward",
)  # fmt: skip
_REAL = ("tau_add", "tau_stable", "tau_semi", "tau_m2t", "tau_t2t", "stop_confidence", "temperature", "top_p")
_PER_SLOT = (
    "tokens_RNB", "masked_RNB", "confidence_RNB", "weight_RNB", "state_RN", "num_steps_RN", "stability_RN",
)  # fmt: skip
_DERIVED = ("positions_RNB", "editable_RNB", "num_editable_RN")
_NEVER = 2.0  # a threshold no confidence exceeds
_ALWAYS = -1.0  # one that every number exceeds


class BlockBuffer:
    """Fixed tensors for `num_rows` sequences of `num_slots` slots; a row without a sequence is all DUMMY.

    Masked is a boolean beside the tokens, never "token == mask id": a prompt may contain the mask token's text.
    """

    first_block_R: Tensor
    origin_R: Tensor
    begin_R: Tensor
    end_R: Tensor
    limit_R: Tensor
    quota_R: Tensor
    fallback_R: Tensor
    eos_stops_R: Tensor
    edits_R: Tensor
    max_edits_R: Tensor
    softens_R: Tensor
    top_k_R: Tensor
    seed_R: Tensor
    forward_R: Tensor
    tau_add_R: Tensor
    tau_stable_R: Tensor
    tau_semi_R: Tensor
    tau_m2t_R: Tensor
    tau_t2t_R: Tensor
    stop_confidence_R: Tensor
    temperature_R: Tensor
    top_p_R: Tensor

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
        slots, positions = (num_rows, num_slots), (num_rows, num_slots, block_size)
        self.tokens_RNB = torch.full(positions, mask_token_id, device=device)
        self.masked_RNB = torch.ones(positions, dtype=torch.bool, device=device)
        self.confidence_RNB = torch.zeros(positions, device=device)
        self.weight_RNB = torch.ones(positions, device=device)
        self.state_RN = torch.full(slots, int(SlotState.DUMMY), dtype=torch.int8, device=device)
        self.num_steps_RN = torch.zeros(slots, dtype=torch.int64, device=device)
        self.stability_RN = torch.ones(slots, dtype=torch.float64, device=device)
        self._whole = torch.zeros((num_rows, len(_WHOLE)), dtype=torch.int64, device=device)
        self._real = torch.zeros((num_rows, len(_REAL)), dtype=torch.float64, device=device)
        self.positions_RNB = torch.zeros(positions, dtype=torch.int64, device=device)
        self.editable_RNB = torch.zeros(positions, dtype=torch.bool, device=device)
        self.num_editable_RN = torch.zeros(slots, dtype=torch.float64, device=device)
        self._eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=device)
        self._slots = torch.arange(num_slots, device=device)
        self._offsets = torch.arange(block_size, device=device)
        self._heads: dict[int, BlockBuffer] = {}
        self._name_parts()
        self._derive()

    def _name_parts(self) -> None:
        """Each setting as a view of its column; each per-slot tensor with what stands in an empty slot."""
        for column, name in enumerate(_WHOLE):
            setattr(self, f"{name}_R", self._whole[:, column])
        for column, name in enumerate(_REAL):
            setattr(self, f"{name}_R", self._real[:, column])
        self._per_slot = {
            self.tokens_RNB: self.mask_token_id,
            self.masked_RNB: True,
            self.confidence_RNB: 0.0,
            self.weight_RNB: 1.0,
            self.state_RN: int(SlotState.DUMMY),
            self.num_steps_RN: 0,
            self.stability_RN: 1.0,
        }

    def head(self, num_rows: int) -> "BlockBuffer":
        """The first rows as a buffer of their own over the same memory."""
        if num_rows == len(self.state_RN):
            return self
        if num_rows in self._heads:
            return self._heads[num_rows]
        view = self._heads[num_rows] = copy.copy(self)
        for name in (*_PER_SLOT, *_DERIVED, "_whole", "_real"):
            setattr(view, name, getattr(self, name)[:num_rows])
        view._name_parts()
        return view

    def _derive(self) -> None:
        """What follows from where the rows stand, and changes only when they move: absolute positions of every slot's
        tokens; which of them the decoder may fill, behind the prompt and before the end of the token budget; how many.
        """
        block = self.first_block_R[:, None] + self._slots
        starts = self.origin_R[:, None] + block * self.block_size
        torch.add(starts[..., None], self._offsets, out=self.positions_RNB)
        begin, end = self.begin_R[:, None, None], self.end_R[:, None, None]
        torch.logical_and(self.positions_RNB >= begin, self.positions_RNB < end, out=self.editable_RNB)
        self.num_editable_RN.copy_(self.editable_RNB.sum(-1))

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
    def asked_RNB(self) -> Tensor:
        """Positions a forward may fill or change: where logits are needed."""
        changes = self.masked_RNB | (self.edits_R + self.softens_R > 0)[:, None, None]
        return changes & self.editable_RNB & self.active_RN[..., None]

    @property
    def progress_RN(self) -> Tensor:
        """Filled share of each slot's editable positions, float64; 1 where nothing is editable."""
        left = (self.masked_RNB & self.editable_RNB).sum(-1)
        return 1.0 - left / self.num_editable_RN.clamp(min=1.0)

    @property
    def next_asked_R(self) -> Tensor:
        """How many positions' logits the next forward may ask for, if one more block opens where there is room."""
        opens = self.resident_RN.sum(-1) < self.limit_R
        return self.asked_RNB.flatten(1).sum(-1) + self.block_size * opens

    def draw(self, at_A: Tensor | None, *, truncates: bool = True) -> Draw:
        """What drawing needs at places `at_A` of the flattened buffer, `None` for all.

        `truncates` may be false where no row sets top_k or top_p: the vocabulary is then not sorted.
        """
        row_A = self._row_at(at_A)
        positions = self.positions_RNB.flatten()
        return Draw(
            temperature_P=self.temperature_R[row_A],
            top_p_P=self.top_p_R[row_A],
            top_k_P=self.top_k_R[row_A],
            seed_P=self.seed_R[row_A],
            position_P=positions if at_A is None else positions[at_A.clamp(max=len(positions) - 1)],
            forward_P=self.forward_R[row_A],
            truncates=truncates,
        )

    def fallback_at(self, at_A: Tensor | None) -> Tensor:
        """The rows' `FALLBACKS` numbers at places `at_A` of the flattened buffer, `None` for all."""
        return self.fallback_R[self._row_at(at_A)]

    def _row_at(self, at_A: Tensor | None) -> Tensor:
        if at_A is None:
            at_A = torch.arange(self.masked_RNB.numel(), device=self.masked_RNB.device)
        return (at_A // (self.num_slots * self.block_size)).clamp(max=len(self.masked_RNB) - 1)

    def join(self, row: int, request: Request) -> None:
        """Seat a request: its boundary block, with the prompt's remainder, becomes slot 0 and is ACTIVE at once."""
        config, sampling, length = request.decoding, request.sampling, len(request.prompt)
        self._clear(row)
        origin = length if config.prompt_attention == "full" else 0
        boundary = (length - origin) // self.block_size
        remainder = request.prompt[origin + boundary * self.block_size :]
        if remainder:
            self.tokens_RNB[row, 0, : len(remainder)] = torch.tensor(remainder)
            self.masked_RNB[row, 0, : len(remainder)] = False
        self.state_RN[row, 0] = int(SlotState.ACTIVE)
        self._whole[row] = torch.tensor(
            [
                boundary,
                origin,
                length,
                length + request.max_tokens,
                config.buffer_size,
                config.tokens_per_step,
                FALLBACKS[config.fallback],
                not request.ignore_eos,
                config.t2t is not None,
                config.t2t.max_edits if config.t2t else 0,
                config.soft is not None,
                sampling.top_k,
                sampling.seed,
                0,
            ]
        )
        self._real[row] = torch.tensor(
            [
                config.tau_add,
                _ALWAYS if config.tau_stable is None else config.tau_stable,
                config.tau_semi,
                config.tau_m2t,
                config.t2t.tau if config.t2t else _ALWAYS if config.soft else _NEVER,
                config.soft.stop_confidence if config.soft else _NEVER,
                sampling.temperature,
                sampling.top_p,
            ],
            dtype=torch.float64,
        )
        self._derive()

    def leave(self, row: int) -> None:
        """Free a row; nothing of its sequence stays."""
        self._clear(row)
        self._derive()

    def save(self, row: int) -> list[Tensor]:
        """A row's state as a value, for `restore`."""
        return [t[row].clone() for t in (*self._per_slot, self._whole, self._real)]

    def restore(self, row: int, saved: list[Tensor]) -> None:
        """Put a saved row where another may have been since."""
        for tensor, value in zip((*self._per_slot, self._whole, self._real), saved, strict=True):
            tensor[row] = value
        self._derive()

    def save_all(self) -> list[Tensor]:
        """All rows' state as a value, for `restore_all`."""
        return [t.clone() for t in (*self._per_slot, self._whole, self._real)]

    def restore_all(self, saved: list[Tensor]) -> None:
        for tensor, value in zip((*self._per_slot, self._whole, self._real), saved, strict=True):
            tensor.copy_(value)
        self._derive()

    def activate(self) -> None:
        """DUMMY -> ACTIVE (Alg. 5 lines 4 to 8): at most one slot a row, the first DUMMY one.

        A row grows when its last ACTIVE block has progress > tau_add and stability > tau_stable, or when no block is
        ACTIVE; never past its buffer size or its token budget, and not while an EOS stands in a resident block
        (Alg. 4 line 5).
        """
        active = self.active_RN
        num_resident_R = self.resident_RN.sum(-1)
        last_active = torch.where(active, self._slots, -1).amax(-1)
        last = last_active.clamp(min=0)[:, None]
        progress = self.progress_RN.gather(1, last)[:, 0]
        stability = self.stability_RN.gather(1, last)[:, 0]
        wants = (last_active < 0) | ((progress > self.tau_add_R) & (stability > self.tau_stable_R))
        starts = self.origin_R + (self.first_block_R + num_resident_R) * self.block_size
        room = (num_resident_R < self.limit_R) & (starts < self.end_R)
        grows = wants & room & ~self._eos_seen_R()
        chosen = grows[:, None] & (self._slots == num_resident_R[:, None])
        self.state_RN.masked_fill_(chosen, int(SlotState.ACTIVE))

    def commit(self, prediction: Prediction, *, revises: bool = True, quotas: bool = True) -> Commit:
        """Accept and revise, mark final blocks TO_CACHE, let the stored ones go and slide (Alg. 5 lines 10 to 25).

        `revises` may be false where no row revises (neither T2T nor DMax), `quotas` where every row's
        `tokens_per_step` is 1: that work is then left out.
        """
        active, complete_before = self.active_RN, self._complete_RN
        clean = self.state_RN == SlotState.TO_CACHE
        accepted = self._accept(prediction, revises, quotas)
        written, num_edited = accepted, torch.zeros_like(self.num_steps_RN)
        if revises:
            filled = ~self.masked_RNB & self.editable_RNB & active[..., None]
            edited = revise(prediction, self.tokens_RNB, filled, tau_R=self.tau_t2t_R)
            written, num_edited = accepted | edited, edited.sum(-1)
            again = filled & (prediction.token_RNB == self.tokens_RNB)
            self.stability_RN.copy_(torch.where(active, _share(again.sum(-1), filled.sum(-1), empty=1.0), 1.0))
            self.num_steps_RN.add_(active & ((self.softens_R[:, None] > 0) | complete_before))
        told = written | (self.softens_R[:, None, None] > 0) & filled if revises else written
        self.confidence_RNB.copy_(torch.where(told, prediction.confidence_RNB, self.confidence_RNB))
        self.tokens_RNB.copy_(torch.where(written, prediction.token_RNB, self.tokens_RNB))
        self.masked_RNB.logical_and_(~accepted)

        final = self._complete_RN
        if revises:
            changed = written.any(-1)
            settled = self._settled(final, complete_before, changed)
            clean = clean | (active & complete_before & ~changed & (self.edits_R[:, None] > 0))
            final = (self.state_RN == SlotState.TO_CACHE) | settled
        final = final.long().cumprod(-1).bool()
        self.state_RN.masked_fill_(final, int(SlotState.TO_CACHE))
        if revises:  # what is stored is stored from hard tokens
            mixed = (self.softens_R[:, None] > 0) & active & ~final
            mixed = mixed[..., None] & self.editable_RNB & ~self.masked_RNB
            self.weight_RNB.copy_(torch.where(mixed, self.confidence_RNB, 1.0))
        self.forward_R.add_(self.resident_RN.any(-1))

        done = Commit(
            clean.long().cumprod(-1).sum(-1),
            self.tokens_RNB.clone(),
            self.masked_RNB.clone(),
            self.confidence_RNB.clone(),
            accepted.sum(-1),
            num_edited,
        )
        self._slide(done.num_blocks_R)
        return done

    @property
    def _complete_RN(self) -> Tensor:
        return self.resident_RN & ~(self.masked_RNB & self.editable_RNB).any(-1)

    def _accept(self, prediction: Prediction, revises: bool, quotas: bool) -> Tensor:
        """Open positions that become tokens; the first slot may fall back, others behind a semi-complete one."""
        open_RNB = self.open_RNB
        semi = self.progress_RN[:, :-1] >= self.tau_semi_R[:, None]
        gate_RN = torch.nn.functional.pad(semi, (1, 0), value=True)
        by_threshold = accept_m2t(
            prediction,
            open_RNB,
            gate_RN=gate_RN,
            tau_R=self.tau_m2t_R,
            quota_R=self.quota_R if quotas else None,
            leftmost_R=self.fallback_R == LEFTMOST,
        )
        if not revises:
            return by_threshold
        from_left = accept_from_left(prediction.confidence_RNB, open_RNB, gate_RN=gate_RN, tau_R=self.tau_m2t_R)
        return torch.where(self.softens_R[:, None, None] > 0, from_left, by_threshold)

    def _settled(self, complete: Tensor, complete_before: Tensor, changed: Tensor) -> Tensor:
        """ACTIVE slots that are done with themselves: complete; if revised, also revised enough.

        A block under T2T that no forward changes any more needs no state for it: it leaves from that forward.
        """
        edits, softens = self.edits_R[:, None] > 0, self.softens_R[:, None] > 0
        capped = complete_before & changed & (self.num_steps_RN >= self.max_edits_R[:, None])
        sure = ((self.confidence_RNB >= self.stop_confidence_R[:, None, None]) | ~self.editable_RNB).all(-1)
        calm = sure | ~changed | (self.num_steps_RN >= self.block_size)
        return complete & torch.where(edits, capped, ~softens | calm)

    def _slide(self, count_R: Tensor) -> None:
        if count_R.device.type == "cpu" and not count_R.any():
            return  # on a GPU a look at it would cost more
        source = self._slots + count_R[:, None]
        fresh = source >= self.num_slots
        source = source.clamp(max=self.num_slots - 1)
        for tensor, empty in self._per_slot.items():
            deep = tensor.ndim == 3
            index = source[..., None].expand_as(tensor) if deep else source
            tensor.copy_(tensor.gather(1, index).masked_fill(fresh[..., None] if deep else fresh, empty))
        self.first_block_R.add_(count_R)
        self._derive()

    def _eos_seen_R(self) -> Tensor:
        is_eos = (self.tokens_RNB[..., None] == self._eos).any(-1)
        standing = is_eos & ~self.masked_RNB & self.editable_RNB & self.resident_RN[..., None]
        return standing.flatten(1).any(-1) & (self.eos_stops_R > 0)

    def _clear(self, row: int) -> None:
        for tensor, empty in self._per_slot.items():
            tensor[row] = empty
        self._whole[row] = 0
        self._real[row] = 0.0


def _share(part: Tensor, whole: Tensor, *, empty: float) -> Tensor:
    """`part / whole` in float64, `empty` where the whole is nothing."""
    return torch.where(whole > 0, part.double() / whole.double().clamp(min=1.0), empty)
