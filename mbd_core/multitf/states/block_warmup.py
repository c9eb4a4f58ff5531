"""Block sizes that change over a run, as in LLaDA2.0's conversion: from small blocks to whole samples and back.

A sample of the data is filled to whole blocks of the trained model's size. For another block size it is filled anew. A
block longer than the sample is cut to the whole sample.
"""

from dataclasses import replace

from mbd_core.multitf.data.example import Example, filled_length
from mbd_core.multitf.states.layout import StateConfig


def states_at(states: StateConfig, share: float) -> StateConfig:
    """The training states after this share of the updates."""
    size = next((size for end, size in states.block_warmup if share < end), states.block_size)
    return states if size == states.block_size else replace(states, block_size=size)


def in_blocks(example: Example, states: StateConfig) -> tuple[Example, StateConfig]:
    """The sample filled to whole blocks of `states.block_size`, and the states with a block no longer than it."""
    size = min(states.block_size, len(example.tokens))
    own = states if size == states.block_size else replace(states, block_size=size)
    earlier = tuple(_filled(answer, size) for answer in example.earlier)
    return replace(_filled(example, size), earlier=earlier), own


def longest_length(length: int, states: StateConfig) -> int:
    """The tokens of the longest sample at any update, if it has `length` tokens with its fill."""
    return max(
        filled_length(length, min(size, length)) for _, size in (*states.block_warmup, (1.0, states.block_size))
    )


def _filled(example: Example, size: int) -> Example:
    """The example with more of its last token, which is EOS, up to a whole block."""
    missing = -len(example.tokens) % size
    return replace(example, tokens=(*example.tokens, *example.tokens[-1:] * missing))
