"""On-policy distillation's training sequences: for each noise-group of a rollout a drawn state, with masks as labels.

OPDLM (arXiv:2606.06712) draws one state of each block, independently. A rollout of several slots has noise-groups
instead: a state's window of blocks. For the answer's first block a forward is drawn among the forwards that decided a
token of the block. Its state has the labels of this block and of the later blocks in its window. The next draw is for
the first block after the window. So every block counts once, in a state that the engine was in. With one slot, and
with block-local states, a group is a block, as in OPDLM.

Shape legend: L positions of an answer with its prompt.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mbd_core.multitf.config import ReplayStates
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.batch import SequenceColumns
from mbd_core.multitf.states.replay import AnswerGrid, ReplayState, state_columns

Choose = Callable[[int], int]
"""Chooses a number from 0 on, below the given number."""


def drawn_states(
    grid: AnswerGrid, states: ReplayStates, *, shrink: int, choose: Choose, counted: np.ndarray
) -> list[ReplayState]:
    """One state of each noise-group, in order, whose labels are its masks at `counted` positions (L).

    With `shrink` n only every n-th of the forwards that decided a token of the block can be drawn.
    """
    clock, blocks, done, found = grid.clock(states), grid.blocks, -1, []
    for block in np.unique(blocks[grid.is_decided]):
        if block <= done:
            continue
        times = np.unique(clock[grid.is_decided & (blocks == block)])[::shrink]
        time = times[choose(len(times))]
        if states == "exact":
            done = blocks[grid.is_decided & (clock == time)].max()
            start = blocks[grid.is_decided & (clock >= time)].min()
        else:
            done = start = block
        is_label = grid.is_decided & counted & (clock >= time) & (blocks >= block) & (blocks <= done)
        is_there, first = (blocks >= start) & (blocks <= done), np.full_like(blocks, start)
        found.append(ReplayState(is_there, clock < time, is_label, first))
    return found


def block_by_block(states: Sequence[ReplayState], blocks: np.ndarray) -> list[ReplayState]:
    """The states as decoding with one slot has them: each labelled block sees finished blocks before it."""
    labelled = [np.isin(blocks, blocks[state.is_label]) | ~state.is_label.any() for state in states]
    return [
        replace(state, is_there=state.is_there & in_block, first=blocks)
        for state, in_block in zip(states, labelled, strict=True)
    ]


def drawn_rows(
    answer: ReplayedAnswer,
    *,
    mask_token_id: int,
    draws: random.Random,
    states: ReplayStates = "exact",
    shrink: int = 1,
    shift: bool = False,
) -> tuple[SequenceColumns, SequenceColumns]:
    """An answer's training sequence of drawn states, and the same states block by block, which a teacher may read.

    Labels are the answer's tokens before its EOS. They have equal weights with the sum 1. Raises `ValueError` if
    nothing predicts an answer's first token.
    """
    if not answer.prompt:
        raise ValueError("an answer without a prompt cannot be taught: no teacher predicts its first token")
    grid = AnswerGrid.of(answer, mask_token_id=mask_token_id)
    counted = np.arange(len(grid.tokens)) < len(answer.prompt) + len(answer.tokens)
    drawn = drawn_states(grid, states, shrink=shrink, choose=draws.randrange, counted=counted)
    return (
        learned_row(grid, drawn, mask_token_id=mask_token_id, shift=shift),
        learned_row(grid, block_by_block(drawn, grid.blocks), mask_token_id=mask_token_id, shift=shift),
    )


def learned_row(
    grid: AnswerGrid, drawn: Sequence[ReplayState], *, mask_token_id: int, shift: bool = False
) -> SequenceColumns:
    """The sequence of the states that have a label, or of the first state if no state has a label."""
    kept = [state for state in drawn if state.is_label.any()] or [drawn[0]]
    columns = state_columns(grid, kept, mask_token_id=mask_token_id, shift=shift)
    has_label = columns["labels"] != IGNORE
    columns |= {"weights": has_label / max(1, has_label.sum()), "rollout": np.zeros_like(has_label)}
    for name in ("forward", "logprobs"):
        del columns[name]
    return columns
