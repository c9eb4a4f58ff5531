"""How many prompt tokens a step takes: as many as leave it short enough for the sequences that decode in it.

A token of a prompt costs more the deeper it stands: its row attends to all tokens before it. The shape of the model
says how many operations a chunk takes at its depth, and the steps that were measured say how long an operation takes
here. Beside it a step's chunks have a cost that is the same however short they are, such as the experts' weights that
even a block reads. So a step's chunks are cut to the seconds that are left beside decoding and this cost. Where nobody
decodes nobody waits for the next step, and a chunk is as long as `max_prefill_tokens` lets it be.
"""

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from mbd_core.models.flops import matrix_flops, pair_flops
from mbd_core.models.model_config import ModelConfig

LEAST_LIMIT = 0.05
"""Seconds of a step that nobody perceives as a pause: the least limit where none is given."""
QUIET_STEPS = 1.75
"""The limit where none is given, in steps that store no prompt. Steps differ by a tenth from what is expected of them,
so that few are longer than two."""
UNMEASURED_TOKENS = (256, 64)
"""Prompt tokens of a step beside others, in turn, until `LEAST_MEASURES` chunks were measured."""
LEAST_MEASURES = 4
KEPT_MEASURES = 7
"""The median of so many counts, so that a step that something else held up changes nothing."""
UNLIKE = 2.0
"""Chunks that differ in operations by this factor tell the cost of an operation from what all chunks cost."""
LEAST_SHARE = 0.1
"""The least share of a step's seconds that its chunks are taken to have cost, and that operations are of these."""


class Positions(Protocol):
    """The positions `[start, stop)` of a sequence."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What the chunks of one step may cost together.

    max_tokens     tokens of all chunks
    seconds        of all chunks, beside what they cost however short they are
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

    max_step_seconds  the limit of a step in which somebody decodes; `None`: `QUIET_STEPS`, at least `LEAST_LIMIT`,
                      and so long that operations may be half of what the chunks cost
    has_streams       somebody waits for the tokens of each step; otherwise no step has a limit
    """

    def __init__(self, model: ModelConfig, *, max_step_seconds: float | None) -> None:
        self._token_flops, self._pair_flops = matrix_flops(model), pair_flops(model)
        self._max_step_seconds = max_step_seconds
        self._quiet_seconds: deque[float] = deque(maxlen=KEPT_MEASURES)
        self._quiet_median: float | None = 0.0  # `None`: to be computed
        self._chunk_measures: deque[tuple[float, float]] = deque(maxlen=KEPT_MEASURES)  # operations, seconds
        self._fixed_seconds = self._flop_seconds = 0.0
        self._leader_pace: Pace | None = None
        self._follows = False
        self.has_streams = True

    @property
    def quiet_seconds(self) -> float:
        """A step's that stores no prompt; 0 before one was measured."""
        if self._quiet_median is None:
            self._quiet_median = statistics.median(self._quiet_seconds)
        return self._quiet_median

    @property
    def limit(self) -> float:
        """Seconds that a step may take."""
        if self._max_step_seconds is not None:
            return self._max_step_seconds
        quiet = self.quiet_seconds
        return max(LEAST_LIMIT, QUIET_STEPS * quiet, quiet + 2 * self._fixed_seconds)

    @property
    def token_seconds(self) -> float:
        """A prompt token's at the beginning of its prompt; 0 before chunks were measured."""
        return self._token_flops * self._flop_seconds

    def observe(self, chunks: Sequence[Positions], *, decodes: bool, seconds: float) -> None:
        """A step of `seconds` has stored `chunks`; `decodes`: beside sequences that decoded."""
        if not chunks:
            self._quiet_seconds.append(seconds)
            self._quiet_median = None
            return
        flops = sum(self._flops(c.start, c.stop) for c in chunks)
        of_chunks = max(seconds - self.quiet_seconds, LEAST_SHARE * seconds) if decodes else seconds
        self._chunk_measures.append((flops, of_chunks))
        self._fit()

    def pace(self) -> Pace | None:
        """The next step's if somebody decodes in it; `None` without a limit."""
        if self._follows:
            return self._leader_pace
        if not self.has_streams:
            return None
        if (count := len(self._chunk_measures)) < LEAST_MEASURES:
            tokens = UNMEASURED_TOKENS[count % len(UNMEASURED_TOKENS)]
            return Pace(max_tokens=tokens, seconds=0.0, token_seconds=0.0, pair_seconds=0.0)
        return Pace(
            max_tokens=1 << 62,
            seconds=max(0.0, self.limit - self.quiet_seconds - self._fixed_seconds),
            token_seconds=self._token_flops * self._flop_seconds,
            pair_seconds=self._pair_flops * self._flop_seconds,
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

    def _fit(self) -> None:
        """Seconds of an operation, and of all chunks of a step beside them: the median of the slopes between chunks
        that are unlike (Theil-Sen). Chunks that are alike leave the second as it was, and so does a longer chunk that
        took less (something else held up the shorter one), and one chunk that is unlike all others, which one
        disturbance would have decide alone."""
        measures = sorted(self._chunk_measures)
        pairs = [
            ((f1, t1), (f2, t2)) for (f1, t1), (f2, t2) in combinations(measures, 2) if f2 >= UNLIKE * f1 and t2 > t1
        ]
        slopes = [(t2 - t1) / (f2 - f1) for (f1, t1), (f2, t2) in pairs]
        if len(slopes) >= LEAST_MEASURES and all(len(set(ends)) > 1 for ends in zip(*pairs, strict=True)):
            slope = statistics.median(slopes)
            self._fixed_seconds = max(0.0, statistics.median(t - slope * f for f, t in measures))
        self._flop_seconds = statistics.median(max(t - self._fixed_seconds, LEAST_SHARE * t) / f for f, t in measures)

    def _flops(self, start: int, stop: int) -> float:
        return (stop - start) * (self._token_flops + self._pair_flops * (start + stop) / 2)
