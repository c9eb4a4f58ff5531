"""A sequence's blocks as counts of open positions, from which the number of an answer's forwards follows.

The rules are those of `mbd_core/decoding/blocks/block_buffer.py`, applied to numbers of tokens instead of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mbd_core.decoding.answers.slots import SlotState
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request

if TYPE_CHECKING:
    from mbd_core.engine.sequences.sequence import SequenceState

FILLER = 1  # the token that every position becomes
ACTIVE, TO_CACHE = int(SlotState.ACTIVE), int(SlotState.TO_CACHE)


@dataclass(slots=True)
class CountedBlock:
    """A resident block: its fillable positions, its open positions, and its state."""

    editable: int
    open: int
    state: int = ACTIVE

    @property
    def progress(self) -> float:
        return 1.0 - self.open / self.editable if self.editable else 1.0


@dataclass(frozen=True, kw_only=True)
class FillRate:
    """How fast blocks fill.

    tokens  tokens that an active block accepts in a forward, on average
    forced  whether blocks accept tokens by the fallback alone

    By the fallback the first block, and a block that follows an almost complete block, accept at least one token.
    """

    tokens: float
    forced: bool = False

    def draw(self, rng: random.Random, *, falls_back: bool) -> int:
        if self.forced and not falls_back:
            return 0
        whole = int(self.tokens)
        number = whole + (rng.random() < self.tokens - whole)
        return max(1, number) if falls_back else number


@dataclass
class CountedRow:
    """One sequence's blocks in the buffer; the first block begins at position `start`."""

    start: int
    end: int
    size: int
    blocks: list[CountedBlock]

    @classmethod
    def of(cls, sequence: SequenceState, size: int) -> CountedRow:
        """The row of a sequence that joins, with the prompt's remainder in its first block."""
        start, known = sequence.committed, len(sequence.tokens)
        editable = min(start + size, sequence.end) - known
        return cls(start, sequence.end, size, [CountedBlock(editable, editable)])

    def activate(self, decoding: DecodingConfig, *, max_blocks: int) -> None:
        """DUMMY -> ACTIVE (Alg. 5 lines 4 to 8)."""
        limit = min(decoding.buffer_size, max(1, max_blocks)) if decoding.adaptive else decoding.buffer_size
        begin = self.start + len(self.blocks) * self.size
        if len(self.blocks) >= limit or begin >= self.end:
            return
        active = [block for block in self.blocks if block.state == ACTIVE]
        if not active or active[-1].progress > decoding.tau_add:
            editable = min(self.size, self.end - begin)
            self.blocks.append(CountedBlock(editable, editable))

    def fill(self, decoding: DecodingConfig, rate: FillRate, rng: random.Random) -> list[int]:
        """The number of tokens that each block accepts in a forward (Alg. 5 lines 10 to 14).

        A complete block becomes TO_CACHE if all blocks before it are complete.
        """
        accepted, falls_back, is_final = [], True, True
        for block in self.blocks:
            is_open = block.state == ACTIVE and block.open > 0
            number = min(block.open, rate.draw(rng, falls_back=falls_back)) if is_open else 0
            falls_back = block.progress >= decoding.tau_semi  # for the next block
            block.open -= number
            accepted.append(number)
            is_final = is_final and not block.open
            if is_final:
                block.state = TO_CACHE
        return accepted

    def slide(self, num_stored: int) -> None:
        del self.blocks[:num_stored]
        self.start += num_stored * self.size

    def leading(self, state: int) -> int:
        """The number of leading blocks in this state."""
        return next((n for n, block in enumerate(self.blocks) if block.state != state), len(self.blocks))


@dataclass(frozen=True, kw_only=True)
class CountedAnswer:
    """Means over answers.

    forwards     forwards of an answer
    first        forwards until its first block is stored
    blocks       blocks in a forward
    open_blocks  incomplete blocks in a forward
    """

    forwards: float
    first: float
    blocks: float
    open_blocks: float


def counted_answer(rate: FillRate, decoding: DecodingConfig, *, length: int, samples: int = 16) -> CountedAnswer:
    """The means over `samples` answers of `length` tokens, whose prompts end anywhere in a block."""
    size = decoding.block_size
    forwards = first = blocks = open_blocks = 0
    for seed in range(samples):
        rng = random.Random(seed)
        known = seed * size // samples  # prompt tokens in the first block
        editable, begin = min(size - known, length), forwards
        row = CountedRow(0, known + length, size, [CountedBlock(editable, editable)])
        while row.start < row.end:
            row.activate(decoding, max_blocks=decoding.buffer_size)
            stored, forwards = row.leading(TO_CACHE), forwards + 1
            blocks += len(row.blocks)
            open_blocks += sum(block.state == ACTIVE for block in row.blocks)
            row.fill(decoding, rate, rng)
            if stored and not row.start:
                first += forwards - begin
            row.slide(stored)
    return CountedAnswer(
        forwards=forwards / samples,
        first=first / samples,
        blocks=blocks / forwards,
        open_blocks=open_blocks / forwards,
    )


def rate_for(tpf: float, decoding: DecodingConfig, *, length: int) -> FillRate:
    """The rate that gives `tpf` on answers of `length` tokens. Raises `ValueError` if no rate gives it."""

    def reached(tokens: float) -> float:
        return length / counted_answer(FillRate(tokens=tokens), decoding, length=length).forwards

    most = reached(decoding.block_size)
    if not 0 < tpf <= most:
        raise ValueError(
            f"tpf={tpf:g} cannot be reached with blocks of {decoding.block_size}, {decoding.buffer_size} slots and "
            f"{length} tokens: it is at most {most:.3g}, since each block is stored by one more forward"
        )
    return FillRate(tokens=_bisect(reached, tpf, 0.0, decoding.block_size))


def _bisect(function: Callable[[float], float], value: float, low: float, high: float) -> float:
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return high


def request_of(name: str, prompt: tuple[int, ...], max_tokens: int, decoding: DecodingConfig) -> Request:
    """A request whose answer has `max_tokens` tokens."""
    return Request(request_id=name, prompt=prompt, max_tokens=max_tokens, decoding=decoding, ignore_eos=True)
