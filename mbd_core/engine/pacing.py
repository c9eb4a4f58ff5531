"""How many prompt tokens a step takes: as many as leave it short enough for the sequences that decode in it.

A token of a prompt costs more the deeper it stands: its row attends to all tokens before it. The shape of the model
says how many operations a chunk takes at its depth, and the steps that were measured say how long an operation takes
here. So a step's chunks are cut to the seconds that are left beside decoding. Where nobody decodes nobody waits for
the next step, and a chunk is as long as `max_prefill_tokens` lets it be.
"""

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from mbd_core.models.model_config import ModelConfig, matrix_flops, pair_flops

LEAST_LIMIT = 0.05
"""Seconds of a step that nobody perceives as a pause: the least limit where none is given."""
QUIET_STEPS = 2.0
"""The limit where none is given, in steps that store no prompt."""
UNMEASURED_TOKENS = 256
"""Prompt tokens of a step beside others until `LEAST_MEASURES` chunks were measured."""
LEAST_MEASURES = 3
KEPT_MEASURES = 7
"""The median of so many counts, so that a step that something else held up changes nothing."""


class Chunk(Protocol):
    """The positions `[start, stop)` of a sequence."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What the chunks of one step may cost together.

    max_tokens     tokens of all chunks
    seconds        of all chunks
    token_seconds  a token's, but for its attention
    pair_seconds   of one token and one token that it attends to
    """

    max_tokens: int
    seconds: float
    token_seconds: float
    pair_seconds: float

    def cost(self, start: int, stop: int) -> float:
        """Seconds of the positions [start, stop) of a sequence, each of which attends to those before it."""
        return (stop - start) * (self.token_seconds + self.pair_seconds * (start + stop) / 2)

    def fitting_blocks(self, start: int, most: int, *, block_size: int, spent: float) -> int:
        """The number of blocks from `start` on, at most `most`, whose cost fits beside `spent` seconds."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = spent + self.cost(start, start + middle * block_size) <= self.seconds
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


class Pacer:
    """Learns from measured steps how long they take, and says what the next one's chunks may cost.

    max_step_seconds  the limit of a step in which somebody decodes; `None`: `QUIET_STEPS`, at least `LEAST_LIMIT`
    has_streams       somebody waits for the tokens of each step; otherwise no step has a limit
    """

    def __init__(self, model: ModelConfig, *, max_step_seconds: float | None) -> None:
        self._token_flops, self._pair_flops = matrix_flops(model), pair_flops(model)
        self._max_step_seconds = max_step_seconds
        self._quiet_seconds: deque[float] = deque(maxlen=KEPT_MEASURES)
        self._flop_seconds: deque[float] = deque(maxlen=KEPT_MEASURES)
        self._leader_pace: Pace | None = None
        self._follows = False
        self.has_streams = True

    @property
    def quiet_seconds(self) -> float:
        """A step's that stores no prompt; 0 before one was measured."""
        return statistics.median(self._quiet_seconds) if self._quiet_seconds else 0.0

    @property
    def limit(self) -> float:
        """Seconds that a step may take."""
        if self._max_step_seconds is not None:
            return self._max_step_seconds
        return max(LEAST_LIMIT, QUIET_STEPS * self.quiet_seconds)

    @property
    def token_seconds(self) -> float:
        """A prompt token's at the beginning of its prompt; 0 before chunks were measured."""
        return self._token_flops * statistics.median(self._flop_seconds) if self._flop_seconds else 0.0

    def observe(self, chunks: Sequence[Chunk], *, decodes: bool, seconds: float) -> None:
        """A step of `seconds` has stored `chunks`; `decodes`: beside sequences that decoded."""
        if not chunks:
            self._quiet_seconds.append(seconds)
            return
        flops = sum(self._flops(c.start, c.stop) for c in chunks)
        of_chunks = max(seconds - self.quiet_seconds, 0.1 * seconds) if decodes else seconds
        self._flop_seconds.append(of_chunks / flops)

    def pace(self) -> Pace | None:
        """The next step's if somebody decodes in it; `None` without a limit."""
        if self._follows:
            return self._leader_pace
        if not self.has_streams:
            return None
        if len(self._flop_seconds) < LEAST_MEASURES:
            return Pace(max_tokens=UNMEASURED_TOKENS, seconds=0.0, token_seconds=0.0, pair_seconds=0.0)
        flop_seconds = statistics.median(self._flop_seconds)
        return Pace(
            max_tokens=1 << 62,
            seconds=max(0.0, self.limit - self.quiet_seconds),
            token_seconds=self._token_flops * flop_seconds,
            pair_seconds=self._pair_flops * flop_seconds,
        )

    @contextmanager
    def without_streams(self) -> Iterator[None]:
        """Inside, no step has a limit: nobody sees its tokens before all are there."""
        self.has_streams = False
        try:
            yield
        finally:
            self.has_streams = True

    def follow(self, pace: Pace | None) -> None:
        """From now on the pace is rank 0's, so that all ranks cut chunks alike."""
        self._follows, self._leader_pace = True, pace

    def _flops(self, start: int, stop: int) -> float:
        return (stop - start) * (self._token_flops + self._pair_flops * (start + stop) / 2)
