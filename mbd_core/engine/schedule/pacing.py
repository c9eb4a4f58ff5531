"""How many prompt tokens a step takes: as many as leave it short enough for the sequences that decode in it.

A token of a prompt costs more the deeper it stands: its row attends to all tokens before it. The shape of the model
gives a chunk's operations at its depth, and measured steps give the seconds of an operation on this device. The chunks
of a step also have a fixed cost, whatever their length: even one block reads the experts' weights. So the chunks are
cut to the seconds that decoding and the fixed cost leave. If no sequence decodes, nobody waits for the step, and a
chunk is as long as `max_prefill_tokens` allows.
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
"""Seconds of a step that nobody perceives as a pause: the smallest limit that the pacer chooses."""
QUIET_STEPS = 1.75
"""The limit that the pacer chooses, in units of a step without prompts. Steps differ by a tenth from their expected
seconds, so few exceed 2."""
UNMEASURED_TOKENS = (256, 64)
"""Prompt tokens of a step with decoding sequences, in turn, until `LEAST_MEASURES` chunks were measured."""
LEAST_MEASURES = 4
KEPT_MEASURES = 7
"""Number of measures in a median, so that a single delayed step changes nothing."""
UNLIKE = 2.0
"""Chunks whose operations differ by this factor separate the cost of an operation from the fixed cost."""
LEAST_SHARE = 0.1
"""At least this share of a step's seconds counts as its chunks' cost, and at least this share of it as operations."""


class Positions(Protocol):
    """The positions `[start, stop)` of a sequence."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The limits on the chunks of one step together, and the costs of their tokens.

    max_tokens     tokens of all chunks
    seconds        seconds of all chunks without the fixed cost
    token_seconds  seconds of a token without its attention
    pair_seconds   seconds of attention from one token to one other token
    """

    max_tokens: int
    seconds: float
    token_seconds: float
    pair_seconds: float

    def cost(self, start: int, stop: int) -> float:
        """Seconds of the positions [start, stop) of a sequence; each attends to all positions before it."""
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
    """Learns from measured steps how long steps take, and bounds the cost of the next step's chunks.

    max_step_seconds  the limit of a step with decoding sequences; `None`: `QUIET_STEPS`, at least `LEAST_LIMIT`, and
                      long enough for operations to be half of the chunks' cost
    has_streams       whether a client waits for the tokens of each step; otherwise no step has a limit
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
        """Seconds of a step without prompts; 0 before such a step was measured."""
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
        """Seconds of a prompt token at the beginning of its prompt; 0 before chunks were measured."""
        return self._token_flops * self._flop_seconds

    def observe(self, chunks: Sequence[Positions], *, decodes: bool, seconds: float) -> None:
        """Learns that a step of `seconds` stored `chunks`; `decodes`: other sequences decoded in it."""
        if not chunks:
            self._quiet_seconds.append(seconds)
            self._quiet_median = None
            return
        flops = sum(self._flops(c.start, c.stop) for c in chunks)
        of_chunks = max(seconds - self.quiet_seconds, LEAST_SHARE * seconds) if decodes else seconds
        self._chunk_measures.append((flops, of_chunks))
        self._fit()

    def pace(self) -> Pace | None:
        """The pace of the next step if a sequence decodes in it; `None` without a limit."""
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
        """No step has a limit inside this context: nobody reads tokens before all of them are there."""
        self.has_streams = False
        try:
            yield
        finally:
            self.has_streams = True

    def follow(self, pace: Pace | None) -> None:
        """Takes rank 0's pace from now on, so that all ranks cut chunks alike."""
        self._follows, self._leader_pace = True, pace

    def _fit(self) -> None:
        """Fits the seconds of an operation and the fixed cost: the median slope between chunks of unlike length
        (Theil-Sen). A longer chunk that took less time forms no pair, because a disturbance held up the shorter chunk.
        With few pairs, or with one chunk in all pairs, which may be an outlier, the fixed cost stays."""
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
