"""When each token of an answer was accepted, and how likely it was: what a replay of its forwards needs."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Edit:
    """A token that stood at an `index` of an answer, from forward `step` on, until a later forward overwrote it."""

    index: int
    step: int
    token: int


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """An answer's step map, its log-probabilities, and the rest of its terminal block.

    Where a filled token stays, forward k of a request (k = 1, 2, ...) has seen the prompt and the tokens whose step is
    less than k, and masks everywhere else. So it can be run again, and it predicts the tokens whose step is k. Where
    tokens are overwritten, or a canvas is filled, the map shows how the answer came about (`Request.replay`).

    steps     of each token: the forward that accepted it, or was the last to overwrite it; 0 for one that was fixed
              before the first forward
    edits     tokens of the answer that were overwritten
    logprobs  of each token: its natural log-probability in that forward; with DMax, which rates a filled position in
              every forward, in the last one before its block was final
    tail_*    what was committed behind the answer in its last block: the EOS, and tokens after it, which the others of
              their block have seen. Empty before the end. Positions past `max_tokens` were masked to the end, and are
              no part of it
    """

    steps: tuple[int, ...] = ()
    edits: tuple[Edit, ...] = ()
    logprobs: tuple[float, ...] = ()
    tail_tokens: tuple[int, ...] = ()
    tail_steps: tuple[int, ...] = ()
    tail_logprobs: tuple[float, ...] = ()

    def then(self, other: Self) -> "Rollout":
        """This part of an answer and the next one."""
        return Rollout(
            steps=self.steps + other.steps,
            edits=self.edits + tuple(replace(edit, index=edit.index + len(self.steps)) for edit in other.edits),
            logprobs=self.logprobs + other.logprobs,
            tail_tokens=other.tail_tokens,
            tail_steps=other.tail_steps,
            tail_logprobs=other.tail_logprobs,
        )

    def cut(self, tokens: tuple[int, ...], number: int, *, room: int) -> "Rollout":
        """The part of the first `number` of its `tokens`; the next ones become the tail, of at most `room` tokens."""
        tail = slice(number, number + room)
        return Rollout(
            steps=self.steps[:number],
            edits=tuple(edit for edit in self.edits if edit.index < number),
            logprobs=self.logprobs[:number],
            tail_tokens=(tokens + self.tail_tokens)[tail],
            tail_steps=(self.steps + self.tail_steps)[tail],
            tail_logprobs=(self.logprobs + self.tail_logprobs)[tail],
        )

    def without(self, number: int) -> "Rollout":
        """The part after its first `number` tokens."""
        return Rollout(
            steps=self.steps[number:],
            edits=tuple(replace(edit, index=edit.index - number) for edit in self.edits if edit.index >= number),
            logprobs=self.logprobs[number:],
            tail_tokens=self.tail_tokens,
            tail_steps=self.tail_steps,
            tail_logprobs=self.tail_logprobs,
        )
