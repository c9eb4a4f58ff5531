"""A piece of an answer: neighbouring tokens, how likely each was, and which forward decided it."""

import math
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict

import numpy as np

MAX_TOPS = 20  # the largest number of likeliest tokens that a request may ask for

TopTokens = tuple[tuple[int, float], ...]
"""The likeliest tokens of a position and their natural log-probabilities, likeliest first."""


@dataclass(frozen=True)
class Edit:
    """A token that stood at an `index` of a piece, from forward `step` on, until a later forward overwrote it."""

    index: int
    step: int
    token: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Neighbouring tokens of an answer, with the facts about each. `piece[a:b]` and `a + b` work as on lists.

    If filled tokens stay, forward k of a request (k = 1, 2, ...) has seen the prompt and the tokens whose step is less
    than k, and masks everywhere else. So forward k can be computed again, and it predicts the tokens whose step is k.
    If tokens are overwritten, or a canvas is filled, the steps show how the answer came about (`Request.replay`).

    logprobs  of each token: its natural log-probability in the forward that accepted it. DMax rates filled positions
              in every forward: there the last forward before the block was final counts
    tops      of each token: the likeliest tokens of its place in that forward; empty if no forward had logits
    steps     of each token: the forward that accepted it, or was the last to overwrite it; 0 if it was fixed before
              the first forward
    edits     tokens of the piece that were overwritten, by index

    A column that was not requested is `None`. Adding a piece without tokens changes no column.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    tops: tuple[TopTokens, ...] | None = None
    steps: tuple[int, ...] | None = None
    edits: tuple[Edit, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> "Piece":
        start, stop, stride = part.indices(len(self.tokens))
        assert stride == 1, "a piece has neighbouring tokens"
        return Piece(
            tokens=self.tokens[part],
            logprobs=None if self.logprobs is None else self.logprobs[part],
            tops=None if self.tops is None else self.tops[part],
            steps=None if self.steps is None else self.steps[part],
            edits=tuple(replace(e, index=e.index - start) for e in self.edits if start <= e.index < stop),
        )

    def __add__(self, other: "Piece") -> "Piece":
        number = len(self.tokens)
        return Piece(
            tokens=self.tokens + other.tokens,
            logprobs=_joined(self.logprobs, other.logprobs),
            tops=_joined(self.tops, other.tops),
            steps=_joined(self.steps, other.steps),
            edits=self.edits + tuple(replace(e, index=e.index + number) for e in other.edits),
        )


def _joined(first: tuple[Any, ...] | None, second: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return None if first is None and second is None else (first or ()) + (second or ())


class ExpertCell(TypedDict):
    """The fields of `ForwardExperts` as plain values."""

    forward: int
    start: int
    shape: list[int]
    ids: bytes


@dataclass(frozen=True)
class ForwardExperts:
    """The experts of a request's tokens in one forward.

    forward  its number among the request's forwards, from 1, as in a step map; 0 if it only stored tokens
    start    the position of the first of these T neighbouring tokens, counted from the prompt's first
    ids      (T, M, K), uint8 or uint16: for each token the K experts of each of the M layers that have experts
    """

    forward: int
    start: int
    ids: np.ndarray

    def columns(self) -> ExpertCell:
        """The fields as plain values, which `of` reads."""
        return {"forward": self.forward, "start": self.start, "shape": list(self.ids.shape), "ids": self.ids.tobytes()}

    @classmethod
    def of(cls, columns: ExpertCell) -> Self:
        size = len(columns["ids"]) // math.prod(columns["shape"])
        ids = np.frombuffer(columns["ids"], dtype=f"<u{size}").reshape(columns["shape"])
        return cls(columns["forward"], columns["start"], ids)
