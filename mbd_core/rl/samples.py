"""Sample rollouts on a page: the best and the worst answer of one group, forward by forward, side by side.

A rollout has each token's forward and log-probability, but neither a block's slot in a forward nor the forward that
stored the block. A frame shows the window of blocks that decided its tokens (`states/replay.py`).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from mbd_core.multitf.states.replay import AnswerGrid
from mbd_core.rl.rollouts import decided, replayed
from mbd_core.rl.rows import RolloutRow, ScoredRow
from mbd_core.trace.recorder import STATES
from mbd_core.trace.replay import ReplayFrame, ReplaySide, ReplaySlot, replay_page, used_tokens
from mbd_core.trace.traced_run import ACTIVE, DUMMY


def samples_page(
    rows: Sequence[ScoredRow], rewards: Sequence[float | None], *, decode: Callable[[int], str]
) -> str | None:
    """The page of the group whose rewards differ most; `None` if no two answers were decoded. `decode` returns the
    text of a token."""
    groups: dict[int, list[tuple[float, int]]] = {}
    for place, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        if reward is not None and decided(row):
            groups.setdefault(row["group"], []).append((reward, place))
    ranked = [sorted(group) for group in groups.values() if len(group) > 1]
    if not ranked:
        return None
    chosen = max(ranked, key=lambda group: group[-1][0] - group[0][0])
    sides = [
        rollout_side(rows[place], name=f"answer {rows[place]['draw'] + 1}, reward {reward:.3f}")
        for reward, place in (chosen[-1], chosen[0])
    ]
    row = rows[chosen[0][1]]
    texts = {token: decode(token) for token in sorted(used_tokens(sides))}
    title = f"Iteration {row['iteration'] + 1}: the best and the worst of {len(chosen)} answers"
    note = f"{row['problem_id']}: {row['prompt']} (right: {row['reference'][:200]})"
    return replay_page(sides, title=title, note=note, texts=texts)


def rollout_side(row: RolloutRow, *, name: str) -> ReplaySide:
    """A rollout's frames."""
    answer = replayed(row, advantage=0.0, correct=False)
    grid = AnswerGrid.of(answer, mask_token_id=-1)
    num_prompt, size = len(answer.prompt), answer.decoding.block_size
    start = int(np.flatnonzero(grid.blocks == grid.blocks[num_prompt])[0])  # where the page begins
    tokens, steps, logprobs = (column[start:] for column in (grid.tokens, grid.steps, grid.logprobs))
    blocks = grid.blocks[start:] - grid.blocks[start]
    num_slots = answer.decoding.buffer_size
    is_useful = np.zeros(len(tokens), dtype=bool)
    is_useful[num_prompt - start : num_prompt - start + len(answer.tokens)] = True
    frames = []
    for forward in range(1, int(steps[grid.is_decided[start:]].max()) + 1):
        is_new, is_filled = steps == forward, steps <= forward
        first = int(blocks[steps >= forward].min())
        last = int(blocks[is_new].max()) if is_new.any() else first - 1
        slots = []
        for slot in range(max(num_slots, last - first + 1)):
            own = np.flatnonzero(blocks == first + slot)
            if first + slot > last:
                slots.append(_slot(0, DUMMY, np.full(size, -1), np.zeros(size), [], ratio=0.0))
                continue
            now = np.where(is_filled[own], tokens[own], -1)
            sure = np.where(is_filled[own] & (steps[own] > 0), np.exp(logprobs[own]), 0.0)
            ratio = float(np.mean(steps[own] >= forward))
            slots.append(_slot(first + slot, ACTIVE, now, sure, np.flatnonzero(is_new[own]), ratio=ratio))
        named = ", ".join(f"B{block + 1}" for block in sorted({*blocks[is_new].tolist()}))
        frames.append(
            ReplayFrame(
                caption=f"Decode {named}" if named else "No token was decided",
                store_only=not named,
                slots=tuple(slots),
                num_tokens=int((is_useful & is_filled).sum()),
                num_committed=int((is_useful & (blocks < first)).sum()),
                num_cached_blocks=first,
            )
        )
    end = num_prompt - start + len(answer.tokens)
    return ReplaySide(
        name=name,
        block_size=size,
        num_slots=max(len(frame.slots) for frame in frames),
        num_blocks=math.ceil(len(tokens) / size),
        num_prompt=num_prompt - start,
        prompt_tokens=tuple(answer.prompt[start:]),
        end=end if answer.tail.tokens else None,
        frames=tuple(frames),
    )


def _slot(
    block: int, state: int, tokens: np.ndarray, sure: np.ndarray, new: Sequence[int] | np.ndarray, *, ratio: float
) -> ReplaySlot:
    return ReplaySlot(
        block=block + 1,
        state=STATES[state],
        mask_ratio=round(ratio, 4),
        tokens=tuple(int(token) for token in tokens),
        confidences=tuple(round(float(value), 4) for value in sure),
        new=tuple(int(place) for place in new),
        edited=(),
    )
