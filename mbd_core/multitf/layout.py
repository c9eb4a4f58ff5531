"""Group-layouts: partitions of K consecutive blocks into noise-groups (paper Section 3.2, App. B.1)."""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Layouts = Literal["systematic", "random", "one_group", "d2f"]
RandomSizes = Literal["paper", "released"]


@dataclass(frozen=True)
class GroupLayout:
    """One partition `lambda = (H_1, ..., H_n)`: the sizes of consecutive noise-groups, in blocks.

    Raises `ValueError` for an empty layout or a group without blocks.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"a group-layout needs groups of at least one block, not sizes={self.sizes}")

    @property
    def num_blocks(self) -> int:
        return sum(self.sizes)

    def first_blocks(self) -> list[int]:
        """For each block the first block of its noise-group, `alpha` of Eq. B.8, counted from 0."""
        starts: list[int] = []
        for size in self.sizes:
            starts += [len(starts)] * size
        return starts


def systematic_layouts(num_blocks: int, max_group: int) -> list[GroupLayout]:
    """`Lambda_sys`: every group size g in 2..max_group at each of its g shifts, boundary groups clipped (Eq. B.1)."""
    _check(num_blocks, max_group)
    layouts = []
    for g in range(2, max_group + 1):
        for shift in range(g):
            bounds = sorted({0, num_blocks, *range(shift, num_blocks, g)})
            layouts.append(GroupLayout(tuple(b - a for a, b in pairwise(bounds))))
    return layouts


def random_layout(num_blocks: int, max_group: int, rng: random.Random) -> GroupLayout:
    """One of `Lambda_rand`: group sizes uniform on 2..max_group until the blocks are covered, the last one clipped."""
    _check(num_blocks, max_group)
    sizes: list[int] = []
    left = num_blocks
    while left:
        sizes.append(min(rng.randint(2, max_group), left))
        left -= sizes[-1]
    return GroupLayout(tuple(sizes))


def released_random_layout(num_blocks: int, max_group: int, rng: random.Random) -> GroupLayout:
    """A random layout as the released code draws it: a last group of one block is repaired, then sizes are shuffled.

    The repair (for `max_group` >= 3) grows the first group that has room by one block; without one it takes a block
    from a group of at least 3, so that two are left over. The paper has neither step.
    """
    sizes = list(random_layout(num_blocks, max_group, rng).sizes)
    if max_group >= 3 and sizes[-1] == 1:
        growing = next((i for i, size in enumerate(sizes[:-1]) if size < max_group), None)
        shrinking = next((i for i, size in enumerate(sizes[:-1]) if size >= 3), None)
        if growing is not None:
            sizes[growing] += 1
            sizes.pop()
        elif shrinking is not None:
            sizes[shrinking] -= 1
            sizes[-1] = 2
    rng.shuffle(sizes)
    return GroupLayout(tuple(sizes))


def one_group_layout(num_blocks: int) -> GroupLayout:
    """All blocks in one noise-group: with layouts over the response, D2F's fully block-causal variant (App. C.5)."""
    return GroupLayout((num_blocks,))


def single_block_layout(num_blocks: int) -> GroupLayout:
    """Teacher forcing as a layout: every block is noisy alone behind a clean prefix (Eq. 2.7)."""
    return GroupLayout((1,) * num_blocks)


def layout_set(
    num_blocks: int,
    *,
    max_group: int,
    num_random: int,
    rng: random.Random,
    kind: Layouts = "systematic",
    random_sizes: RandomSizes = "paper",
) -> list[GroupLayout]:
    """`Lambda = Lambda_sys + Lambda_rand` (Eq. B.2), or the random ones alone; `max_group=1` is plain teacher forcing.

    `one_group` and `d2f` are one layout, of one noise-group over all blocks.
    """
    if kind in ("one_group", "d2f"):
        return [one_group_layout(num_blocks)]
    if max_group == 1:
        return [single_block_layout(num_blocks)]
    draw = random_layout if random_sizes == "paper" else released_random_layout
    drawn = [draw(num_blocks, max_group, rng) for _ in range(num_random)]
    return drawn if kind == "random" else systematic_layouts(num_blocks, max_group) + drawn


def _check(num_blocks: int, max_group: int) -> None:
    if num_blocks < 1:
        raise ValueError(f"num_blocks={num_blocks}: a layout needs at least one block")
    if max_group < 2:
        raise ValueError(f"max_group={max_group}: noise-groups hold at least 2 blocks; use 1 for teacher forcing")
