"""An answer with the counts of its decoding: a string, so that lm-evaluation-harness carries it like any other."""

from typing import Self

from mbd_core.decoding.request import Counts, FinishReason


class CountedText(str):
    """A text with its counts and the reason of its end; `counts` is `None` for a request that was not decoded."""

    counts: Counts | None
    finish_reason: FinishReason | None

    def __new__(cls, text: str, counts: Counts | None = None, finish_reason: FinishReason | None = None) -> Self:
        self = super().__new__(cls, text)
        self.counts, self.finish_reason = counts, finish_reason
        return self

    def __getnewargs__(self) -> tuple[str, Counts | None, FinishReason | None]:  # type: ignore[override]
        """The harness keeps answers in a cache."""
        return str(self), self.counts, self.finish_reason

    def measures(self) -> dict[str, float]:
        """NFE, tokens, TPF, TPS and whether it was cut, as numbers; nothing of a request that was not decoded.

        TPS counts the seconds of the steps that the request took part in, others of its batch beside it.
        """
        if self.counts is None:
            return {}
        seconds = self.counts.decode_seconds
        return {
            "nfe": float(self.counts.num_forwards),
            "tokens": float(self.counts.num_tokens),
            "tpf": self.counts.tpf,
            "tps": self.counts.num_tokens / seconds if seconds else 0.0,
            "cut": float(self.finish_reason == "length"),
        }
