"""The cost of a replay in tokens, beside the cost of TraceRL's rows."""

from dataclasses import dataclass

import numpy as np

from mbd_core.multitf.config import ReplayStates
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.replay import AnswerGrid, replayed_states


@dataclass(frozen=True)
class ReplayCost:
    """Tokens that a learner computes for `forwards` forwards: `noisy` tokens of all states, and `clean` tokens.

    `trace_rl` counts TraceRL's rows: one for each step of the answer's slowest block, with the prompt and twice the
    answer in whole blocks. It scores block-local states, so the two costs buy different things.
    """

    forwards: int = 0
    noisy: int = 0
    clean: int = 0
    trace_rl: int = 0

    def __add__(self, other: "ReplayCost") -> "ReplayCost":
        return ReplayCost(
            self.forwards + other.forwards,
            self.noisy + other.noisy,
            self.clean + other.clean,
            self.trace_rl + other.trace_rl,
        )

    @property
    def tokens(self) -> int:
        return self.noisy + self.clean


def replay_cost(answer: ReplayedAnswer, *, shrink: int = 1, states: ReplayStates = "exact") -> ReplayCost:
    """The cost of one answer for a learner, from its step map alone."""
    grid = AnswerGrid.of(answer, mask_token_id=0)
    all_states = list(replayed_states(grid, states, shrink))
    end = max(int(state.first[state.is_there].max()) for state in all_states)
    response = len(grid.tokens) - len(answer.prompt)
    slowest = int(grid.clock("block-local")[grid.is_decided].max())
    return ReplayCost(
        forwards=len(np.unique(grid.steps[grid.is_decided])),
        noisy=sum(int(state.is_there.sum()) for state in all_states),
        clean=int((grid.blocks < end).sum()),
        trace_rl=-(-slowest // shrink) * (len(answer.prompt) + 2 * response),
    )
