"""Rollouts as training sequences: each forward that decided tokens is a noisy stream, and all share a clean stream.

A rollout's step map names the forward that decided each token. Forward k saw the prompt, the tokens with a step less
than k, and masks elsewhere. It is rebuilt as a window of blocks under the predicate of `mask.py`:

    first(k)  the first block with a token of step >= k; earlier blocks are complete, and their keys are the clean ones
    last(k)   the last block with a token of step k: attention is block-causal, so later blocks do not matter
    content   a token where its step is less than k, else the mask; labels where its step is k

Four slots, blocks of two, `. ` for a mask, labels in brackets; forward 3 begins at block 2, since block 1 is complete:

    steps      1 2 | 1 3 | 2 3 | 4 4
    forward 1  [][]  [] .                  blocks 1 to 2
    forward 2  a []  b .   [] .            blocks 1 to 3
    forward 3        b []  c []            blocks 2 to 3, after clean block 1
    forward 4                    [][]      block 4, after clean blocks 1 to 3

So the learner's log-probabilities are the engine's, forward by forward, for any buffer size. Two other kinds of states
come from released learners, and are wrong under MultiBD. `block-local` is TraceRL's: steps are ranked within each
block, and a block sees clean blocks before it. With one slot these are the engine's states; with more slots a block's
logits depended on gaps in earlier blocks. `all-masked` is LightningRL's released learner: each block is predicted in
one forward, all its tokens masked, from clean blocks before it.

Shape legend: L positions of an answer with its prompt, S training sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from mbd_core.decoding.answers.piece import ForwardExperts
from mbd_core.multitf.config import ReplayStates
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.states.batch import MultiTFBatch, SequenceColumns, collate_as
from mbd_core.multitf.states.packing import Together


@dataclass(frozen=True)
class AnswerGrid:
    """A prompt and its answer on their block grid, up to the end of the answer's last block; all (L).

    tokens    token of each position; the mask past `max_tokens`
    steps     forward that decided the position; 0 for the prompt, fixed tokens, and masks past `max_tokens`
    logprobs  the engine's log-probability of the token, 0 where no forward decided
    blocks    block of the position; a prompt that attends in full is block 0, and the answer's blocks follow (D2F)
    """

    tokens: np.ndarray
    steps: np.ndarray
    logprobs: np.ndarray
    blocks: np.ndarray

    @classmethod
    def of(cls, answer: ReplayedAnswer, *, mask_token_id: int) -> Self:
        prompt, size = len(answer.prompt), answer.decoding.block_size
        origin = answer.decoding.grid_origin(prompt)
        fill = -(prompt + len(answer.steps) - origin) % size
        before, after = np.zeros(prompt), np.zeros(fill)
        blocks = (np.arange(prompt + len(answer.steps) + fill) - origin) // size + (origin > 0)
        return cls(
            tokens=np.array([*answer.prompt, *answer.decided, *[mask_token_id] * fill], dtype=np.int64),
            steps=np.array([*[0] * prompt, *answer.steps, *[0] * fill], dtype=np.int64),
            logprobs=np.concatenate((before, np.array(answer.logprobs), after)),
            blocks=blocks.clip(min=0),
        )

    @property
    def is_decided(self) -> np.ndarray:
        """Where a forward has put a token (L)."""
        return self.steps > 0

    def clock(self, states: ReplayStates) -> np.ndarray:
        """The time at which each position is decided in these states (L). All labels of a state have one time, and the
        state sees tokens of earlier times."""
        clock: np.ndarray = self.steps.copy()
        if states == "block-local":
            for block in np.unique(self.blocks[self.is_decided]):
                own = self.is_decided & (self.blocks == block)
                clock[own] = np.unique(self.steps[own], return_inverse=True)[1] + 1
        elif states == "all-masked":
            clock[self.is_decided] = 1
        return clock


@dataclass(frozen=True)
class ReplayState:
    """The content of a noisy stream; all (L).

    is_there    positions that the stream has
    is_visible  positions whose tokens the stream shows; the other positions are masks
    is_label    positions whose tokens are labels
    first       the first block of each position's window
    """

    is_there: np.ndarray
    is_visible: np.ndarray
    is_label: np.ndarray
    first: np.ndarray


def replayed_states(grid: AnswerGrid, states: ReplayStates, shrink: int) -> Iterator[ReplayState]:
    """The states of an answer in order. Every `shrink` consecutive states become one, with the inputs of the first and
    the labels of all."""
    clock, blocks = grid.clock(states), grid.blocks
    times = np.unique(clock[grid.is_decided])
    for start in range(0, len(times), shrink):
        low, high = times[start], times[min(start + shrink, len(times)) - 1]
        is_label = grid.is_decided & (clock >= low) & (clock <= high)
        if states == "exact":
            window = blocks[grid.is_decided & (clock >= low)].min(), blocks[is_label].max()
            is_there, first = (blocks >= window[0]) & (blocks <= window[1]), np.full_like(blocks, window[0])
        else:
            is_there, first = np.isin(blocks, blocks[is_label]), blocks
        yield ReplayState(is_there, clock < low, is_label, first)


@dataclass(frozen=True)
class ReplayBatch(MultiTFBatch):
    """Training sequences of rollouts, all (S, L): a sample is an answer, and each of its noisy streams a state.

    `forward`, `logprobs`, `advantage` and `correct` belong to a label's token. `old` and `reference` are the
    log-probabilities of a ratio's denominator and of a KL divergence: the engine's, until a learner writes its own.
    `weights` give the mean over an answer's tokens until an objective sets them; `kl_weights` and `nll_weights` are 0
    until then (`policy_weights.weighed`).
    """

    padding: ClassVar[dict[str, Any]] = MultiTFBatch.padding | {
        "logprobs": 0.0,
        "old": 0.0,
        "reference": 0.0,
        "advantage": 0.0,
        "correct": False,
        "kl_weights": 0.0,
        "nll_weights": 0.0,
    }

    forward: Tensor
    logprobs: Tensor
    old: Tensor
    reference: Tensor
    advantage: Tensor
    correct: Tensor
    kl_weights: Tensor
    nll_weights: Tensor


@dataclass(frozen=True)
class RoutedBatch(ReplayBatch):
    """Training sequences of rollouts with the engine's experts (S, L, M, K) of each token in M layers.

    This is rollout routing replay, R3 (arXiv:2510.11370). Padding has expert 0.
    """

    experts: Tensor


def collate_answers(rows: Sequence[SequenceColumns], together: Together | None = None) -> ReplayBatch:
    """`collate_as` for answers; a `RoutedBatch` for rows with experts. Raises `ValueError` if only some rows have
    experts."""
    tables = [row.get("experts") for row in rows]
    batch = collate_as(ReplayBatch, [{n: c for n, c in row.items() if n != "experts"} for row in rows], together)
    records = [table for table in tables if table is not None]
    if not records:
        return batch
    if len(records) < len(rows):
        raise ValueError(
            f"{len(rows) - len(records)} of {len(rows)} answers have no recorded experts; give all, or none"
        )
    experts = torch.zeros((*batch.input_ids.shape, *records[0][0].shape), dtype=torch.int16)
    for number, table in enumerate(records):
        experts[batch.sample == number] = torch.from_numpy(np.stack(table).astype(np.int16))
    return RoutedBatch(**vars(batch), experts=experts)


def replay_batch(
    answers: Sequence[ReplayedAnswer],
    *,
    mask_token_id: int,
    shrink: int = 1,
    states: ReplayStates = "exact",
    shift: bool = False,
    together: Together | None = None,
) -> ReplayBatch:
    """The answers' states as one batch, on the CPU.

    Every `shrink` consecutive states become one; only 1 is exact. `shift`: the model's logits at a position predict
    the next position's token. `together`: the answers that share a training sequence, by default none. Raises the
    `ValueError` of `replay_row`.
    """
    rows = [
        replay_row(answer, mask_token_id=mask_token_id, shrink=shrink, states=states, shift=shift)
        for answer in answers
    ]
    return collate_answers(rows, together)


def replay_row(
    answer: ReplayedAnswer, *, mask_token_id: int, shrink: int = 1, states: ReplayStates = "exact", shift: bool = False
) -> SequenceColumns:
    """One answer's training sequence: its noisy streams, then the clean blocks that they see.

    Raises `ValueError` for a `shrink` that cannot be honoured, if nothing predicts an answer's first token, and for
    recorded experts of other states.
    """
    if shrink < 1 or (states == "all-masked" and shrink > 1):
        raise ValueError(f"shrink={shrink} must be at least 1, and 1 with states=all-masked, which are one already")
    if shift and not answer.prompt:
        raise ValueError(
            "an answer without a prompt cannot be replayed with shifted logits: nothing predicts its start"
        )
    grid = AnswerGrid.of(answer, mask_token_id=mask_token_id)
    columns = state_columns(
        grid, list(replayed_states(grid, states, shrink)), mask_token_id=mask_token_id, shift=shift
    )
    has_label = columns["labels"] != IGNORE
    columns |= {
        "weights": has_label / has_label.sum(),
        "rollout": np.zeros_like(has_label),
        "old": columns["logprobs"],
        "reference": columns["logprobs"],
        "advantage": has_label * answer.advantage,
        "correct": has_label & answer.correct,
        "kl_weights": np.zeros(len(has_label)),
        "nll_weights": np.zeros(len(has_label)),
    }
    if not answer.experts:
        return columns
    if states != "exact" or shrink > 1:
        raise ValueError(
            "recorded experts are those of the engine's forwards: replay them with states=exact, shrink=1"
        )
    times = np.unique(grid.steps[grid.is_decided])
    forwards = np.array([0, *times])[columns["stream"]]
    return columns | {"experts": _recorded_experts(answer.experts, forwards, columns["positions"])}


def state_columns(
    grid: AnswerGrid, all_states: Sequence[ReplayState], *, mask_token_id: int, shift: bool
) -> dict[str, np.ndarray]:
    """The noisy streams of states, then the clean blocks that they see. There are no weights yet."""
    clean_at = sum(int(state.is_there.sum()) for state in all_states)
    parts: list[dict[str, np.ndarray]] = []
    start = 0
    for number, state in enumerate(all_states, start=1):
        parts.append(_noisy_columns(grid, state, number, mask_token_id=mask_token_id))
        (places,) = state.is_there.nonzero()
        source = start + np.arange(len(places)) - shift
        if shift:  # the last clean token stands before the first token of a window
            is_head = (grid.blocks[places] == state.first[places]) & (np.diff(grid.blocks[places], prepend=-1) != 0)
            source = np.where(is_head, clean_at + places - 1, source)
        parts[-1]["source"] = source.clip(min=0)
        start += len(places)
    parts.append(_clean_columns(grid, max(int(state.first[state.is_there].max()) for state in all_states)))
    parts[-1]["source"] = clean_at + np.arange(len(parts[-1]["labels"]))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _recorded_experts(
    records: Sequence[ForwardExperts], forwards: np.ndarray, positions: np.ndarray
) -> list[np.ndarray]:
    """The experts (M, K) of each token, given its forward and position (L).

    The clean stream, forward 0, has the experts of the last forward that held the position, which stored it.
    """
    by_forward = {record.forward: record for record in records if record.forward}
    stored = {record.start + place: ids for record in records for place, ids in enumerate(record.ids)}
    experts = []
    for forward, position in zip(forwards.tolist(), positions.tolist(), strict=True):
        ids = stored.get(position)
        if forward:
            record = by_forward.get(forward)
            place = -1 if record is None else position - record.start
            ids = None if record is None or not 0 <= place < len(record.ids) else record.ids[place]
        if ids is None:
            raise ValueError(
                f"the rollout has no experts of position {position} in forward {forward}: its record is not whole"
            )
        experts.append(ids)
    return experts


def _noisy_columns(grid: AnswerGrid, state: ReplayState, number: int, *, mask_token_id: int) -> dict[str, np.ndarray]:
    """The columns of noisy stream `number`, without `source`."""
    places, blocks = state.is_there, grid.blocks[state.is_there]
    is_label = state.is_label[places]
    num_masked, num_there = (np.bincount(blocks, weights=w) for w in (~state.is_visible[places], np.ones(len(blocks))))
    return {
        "input_ids": np.where(state.is_visible, grid.tokens, mask_token_id)[places],
        "positions": places.nonzero()[0],
        "stream": np.full(len(blocks), number),
        "block": blocks,
        "first": state.first[places],
        "labels": np.where(is_label, grid.tokens[places], IGNORE),
        "slot": blocks - state.first[places],
        "ratio": num_masked[blocks] / num_there[blocks],
        "forward": np.where(is_label, grid.steps[places], 0),
        "logprobs": np.where(is_label, grid.logprobs[places], 0.0),
    }


def _clean_columns(grid: AnswerGrid, end: int) -> dict[str, np.ndarray]:
    """The columns of the clean stream, without `source`: the blocks before block `end`, which are complete."""
    positions = (grid.blocks < end).nonzero()[0]
    blocks, zeros = grid.blocks[positions], np.zeros(len(positions), dtype=np.int64)
    return {
        "input_ids": grid.tokens[positions],
        "positions": positions,
        "stream": zeros,
        "block": blocks,
        "first": blocks + 1,
        "labels": np.full(len(positions), IGNORE),
        "slot": zeros,
        "ratio": zeros.astype(float),
        "forward": zeros,
        "logprobs": zeros.astype(float),
    }
