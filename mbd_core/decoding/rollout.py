"""When each token of an answer was accepted, and how likely it was: what a replay of its forwards needs."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """An answer's step map, its log-probabilities, and the rest of its terminal block.

    Forward k of a request (k = 1, 2, ...) has seen the prompt and the tokens whose step is less than k, and masks
    everywhere else. So it can be run again, and it predicts the tokens whose step is k.

    steps     of each token: the forward that accepted it; 0 for one that was fixed before the first forward
    logprobs  of each token: its natural log-probability in that forward
    tail_*    what was committed behind the answer in its last block: the EOS, and tokens after it, which the others of
              their block have seen. Empty before the end. Positions past `max_tokens` were masked to the end, and are
              no part of it
    """

    steps: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tail_tokens: tuple[int, ...] = ()
    tail_steps: tuple[int, ...] = ()
    tail_logprobs: tuple[float, ...] = ()

    def then(self, other: Self) -> "Rollout":
        """This part of an answer and the next one."""
        return Rollout(
            steps=self.steps + other.steps,
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
            logprobs=self.logprobs[:number],
            tail_tokens=(tokens + self.tail_tokens)[tail],
            tail_steps=(self.steps + self.tail_steps)[tail],
            tail_logprobs=(self.logprobs + self.tail_logprobs)[tail],
        )

    def without(self, number: int) -> "Rollout":
        """The part after its first `number` tokens."""
        return Rollout(
            steps=self.steps[number:],
            logprobs=self.logprobs[number:],
            tail_tokens=self.tail_tokens,
            tail_steps=self.tail_steps,
            tail_logprobs=self.tail_logprobs,
        )
