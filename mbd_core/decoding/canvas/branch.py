"""One branch of BlockBatch: a lane that is decoded with one block length, and the branch's counts.

Shape legend: G positions after the prompt, K remembered tokens of a position, P positions with logits, S proposals of
a position, V vocabulary.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.canvas.lane import Lane


class Phase(Enum):
    """The kind of the next forward. It computes one lane (INIT), the branches' windows, or their whole canvases."""

    INIT = "init"
    BLOCK = "block"
    REFRESH = "refresh"


@dataclass(frozen=True)
class BranchStats:
    """The counts of one branch: its forwards by kind, its tokens by origin, and its positions without a mask.

    num_decoded is Algorithm 2's progress: the branch's own tokens, and the leader's count after a sync. num_copied is
    the sum by which syncs raised num_decoded.
    """

    block_length: int
    num_init: int
    num_block: int
    num_refresh: int
    num_decoded: int
    num_merged: int
    num_copied: int
    num_filled: int


def likeliest_tokens(logits_PV: Tensor, tau_merge: float) -> tuple[Tensor, Tensor]:
    """The K likeliest tokens of each position and their probabilities (P, K), in one copy to the host.

    Fewer than 1 / tau_merge tokens can exceed tau_merge, so K = ceil(1 / tau_merge) holds all tokens that may be
    merged.
    """
    count = min(math.ceil(1 / tau_merge), logits_PV.shape[1])
    top = logits_PV.float().softmax(-1).topk(count, dim=-1)
    host = torch.stack((top.indices.double(), top.values.double())).cpu()
    return host[0].long(), host[1]


class ProbabilityMap:
    """A branch's probabilities: the likeliest tokens of each position in the last forward that predicted the
    position."""

    def __init__(self, num_positions: int, tau_merge: float) -> None:
        count = math.ceil(1 / tau_merge)
        self._tokens_GK = torch.full((num_positions, count), -1)
        self._p_GK = torch.zeros(num_positions, count, dtype=torch.float64)

    def replace(self, offsets_P: Tensor, tokens_PK: Tensor, p_PK: Tensor) -> None:
        """Replace the remembered tokens of some positions by these `likeliest_tokens`."""
        self._tokens_GK[offsets_P, : tokens_PK.shape[1]] = tokens_PK
        self._p_GK[offsets_P, : p_PK.shape[1]] = p_PK

    def probability(self, tokens_SG: Tensor) -> Tensor:
        """The probability (S, G) of each proposed token; 0 for a token that is not remembered."""
        return ((self._tokens_GK == tokens_SG[..., None]) * self._p_GK).sum(-1)


class Branch:
    """The state of one branch: its lane, its window, its probabilities and its counts."""

    def __init__(self, index: int, block_length: int, lane: Lane, prompt_length: int, tau_merge: float) -> None:
        self.index, self.block_length, self.lane = index, block_length, lane
        self.begin, self.length = prompt_length, len(lane.tokens)
        self.probabilities = ProbabilityMap(self.length - prompt_length, tau_merge)
        self.done = False
        self.num_decoded = self.num_merged = self.num_copied = 0
        self.blocks_since_refresh = 0
        self.wants_refresh = False
        self.forwards = dict.fromkeys(Phase, 0)
        self.start = self.stop = prompt_length
        self.align()

    @property
    def open_positions(self) -> np.ndarray:
        """Masked positions of the window, ascending."""
        return self.lane.open_positions(self.start, self.stop)

    def align(self) -> None:
        """Move the window to the block with the first mask; without a mask the branch is done."""
        first = self.lane.first_mask(self.begin)
        if first == self.length:
            self.done = True
            return
        block = (first - self.begin) // self.block_length
        self.start = self.begin + block * self.block_length
        self.stop = min(self.start + self.block_length, self.length)

    def advance(self, refresh: int) -> None:
        """If the window has no masks, count its block towards the next refresh and move the window."""
        if self.done or len(self.open_positions):
            return
        self.blocks_since_refresh += 1
        self.wants_refresh |= self.blocks_since_refresh * self.block_length >= refresh
        self.align()

    def ending_eos(self, ends: tuple[int, ...], *, anywhere: bool) -> int | None:
        """The first of `ends`, if no mask precedes it and its block is complete. The search begins at the window, or
        with `anywhere` at the prompt's end."""
        begin = self.begin if anywhere else self.start
        first_mask = self.lane.first_mask(begin)
        eos = self.lane.find(ends, begin, first_mask)
        if eos is None:
            return None
        block_end = eos + self.block_length - (eos - self.begin) % self.block_length
        return eos if first_mask >= min(block_end, self.length) else None

    def stats(self) -> BranchStats:
        return BranchStats(
            block_length=self.block_length,
            num_init=self.forwards[Phase.INIT],
            num_block=self.forwards[Phase.BLOCK],
            num_refresh=self.forwards[Phase.REFRESH],
            num_decoded=self.num_decoded,
            num_merged=self.num_merged,
            num_copied=self.num_copied,
            num_filled=int((~self.lane.masked[self.begin :]).sum()),
        )


def compatible(lane: Lane, other: Lane) -> bool:
    """Whether two lanes hold the same token wherever both are decided."""
    decided = ~lane.masked & ~other.masked
    return bool((lane.tokens == other.tokens)[decided].all())


@dataclass(frozen=True)
class LaneChanges:
    """The changes of one forward on a branch's lane, by block.

    accepted    number of masks that became tokens
    edited      number of tokens that were replaced or masked again
    mask_ratio  share of the block's positions that were masked before, for every block in `accepted`
    """

    accepted: dict[int, int]
    edited: dict[int, int]
    mask_ratio: dict[int, float]


def lane_changes(branch: Branch, earlier: Lane) -> LaneChanges:
    """The difference between a branch's lane and the same lane before the forward."""
    lane, length = branch.lane, branch.block_length

    def count_by_block(changes: np.ndarray) -> dict[int, int]:
        blocks, counts = np.unique((np.flatnonzero(changes) - branch.begin) // length, return_counts=True)
        return dict(zip(blocks.tolist(), counts.tolist(), strict=True))

    accepted = count_by_block(earlier.masked & ~lane.masked)
    mask_ratio = {}
    for block in accepted:
        start = branch.begin + block * length
        mask_ratio[block] = float(earlier.masked[start : start + length].mean())
    edited = count_by_block(~earlier.masked & ((lane.tokens != earlier.tokens) | lane.masked))
    return LaneChanges(accepted, edited, mask_ratio)
