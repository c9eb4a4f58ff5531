"""What a load generator notes of one request: when it was due, when its tokens came, how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Tokens that came together: an event of a stream, or a step of an engine; `at` is a time in seconds."""

    at: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds of one clock, and latencies count from `due`.

    due       when the load asked for it; a generator that is late sends it later
    arrivals  its tokens as they came
    ended     when its end came: the last event, a whole answer, or the error
    error     the kind of its failure; `None` for a request that ended as promised
    """

    due: float
    arrivals: tuple[Arrival, ...]
    ended: float
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(a.num_tokens for a in self.arrivals)

    @property
    def seconds(self) -> float:
        """From the time it was due to its end."""
        return self.ended - self.due

    @property
    def first_token_seconds(self) -> float | None:
        """TTFT: to the first arrival, which in block diffusion may hold a whole block."""
        return self.arrivals[0].at - self.due if self.arrivals else None

    @property
    def token_seconds(self) -> float | None:
        """TPOT: the time between the first and the last arrival for each token but the first; `None` below two."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals[-1].at - self.arrivals[0].at) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """The times between consecutive arrivals."""
        return [b.at - a.at for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def inter_token_seconds(self) -> list[float]:
        """ITL of every token but the first. Tokens of one arrival came at the same time, so all but one have 0.

        Their mean is `token_seconds`.
        """
        if not self.arrivals:
            return []
        latencies = [0.0] * (self.arrivals[0].num_tokens - 1)
        for gap, arrival in zip(self.gaps, self.arrivals[1:], strict=True):
            latencies += [gap] + [0.0] * (arrival.num_tokens - 1)
        return latencies


def shared_out(total: int, weights: Sequence[int]) -> list[int]:
    """`total` tokens divided among events in proportion to `weights`, each at least 1 while there are enough.

    For streams that say how many tokens they had in all, and not how many came with each event.
    """
    if not weights:
        return []
    least = min(1, total // len(weights))
    rest, weight = total - least * len(weights), sum(weights) or len(weights)
    exact = [rest * (w if sum(weights) else 1) / weight for w in weights]
    shares = [least + int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
