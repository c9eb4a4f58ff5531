# mypy: disable-error-code="import-not-found, no-untyped-def"
"""A layer's assignments sorted by expert and cut into tiles, as one Triton kernel without a sort.

An assignment's place is the number of assignments before it, found by counting. A decoding step has few assignments,
so counting is less work than a sort, and needs one launch. Some programs place assignments; the other programs count
every expert's assignments and find the tiles. `choice.sort_by_expert` defines the order.

Shape legend: T tokens, K experts a token, A = T * K assignments, E experts, N tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mbd_core.ops.launch import Kernel, launch, power_of_two

_PLACED = 32  # assignments or tiles of a program
_CHUNK = 32  # assignments compared at once
tl: Any = None  # triton.language, set when a kernel is compiled


class SortedTiles(NamedTuple):
    """Assignments by expert, cut into tiles.

    `order_A` (int64): assignments by expert; assignments without an expert come last. `expert_N`, `first_N`, `end_N`
    (int32): each tile's expert and rows of that order. A tile without rows has end = first.
    """

    order_A: Tensor
    expert_N: Tensor
    first_N: Tensor
    end_N: Tensor


def _tiles_kernel(
    ids_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    A,
    E,
    N,
    placing,
    TILE,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Each of the first `placing` programs finds the places of BLOCK assignments, each other program BLOCK tiles."""
    program = tl.program_id(0)
    step = tl.arange(0, CHUNK)
    if program < placing:
        mine = program * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(ids_ptr + mine, mask=mine < A, other=0).to(tl.int32)
        rank = tl.zeros((BLOCK, CHUNK), tl.int32)  # summed once, after the loop: a sum takes all threads
        for start in range(0, A, CHUNK):
            other = start + step
            their = tl.load(ids_ptr + other, mask=other < A, other=2147483647).to(tl.int32)
            less = their[None, :] < expert[:, None]
            earlier = (their[None, :] == expert[:, None]) & (other[None, :] < mine[:, None])
            rank += (less | earlier).to(tl.int32)
        place = tl.sum(rank, 1)
        tl.store(order_ptr + place, mine.to(tl.int64), mask=mine < A)
        return
    every = tl.arange(0, BLOCK_E)
    seen = tl.zeros((BLOCK_E, CHUNK), tl.int32)
    for start in range(0, A, CHUNK):
        other = start + step
        their = tl.load(ids_ptr + other, mask=other < A, other=2147483647).to(tl.int32)
        seen += (their[None, :] == every[:, None]).to(tl.int32)
    counts = tl.where(every < E, tl.sum(seen, 1), 0)
    tiles = (counts + TILE - 1) // TILE
    last = tl.cumsum(tiles, 0)
    ends = tl.cumsum(counts, 0)
    tile = (program - placing) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    here = every[None, :] == expert[:, None]
    first = tl.sum(tl.where(here, (ends - counts - (last - tiles) * TILE)[None, :], 0), 1) + tile * TILE
    end = tl.minimum(first + TILE, tl.sum(tl.where(here, ends[None, :], 0), 1))
    used = expert < E
    tl.store(expert_ptr + tile, tl.where(used, expert, 0), mask=tile < N)
    tl.store(first_ptr + tile, tl.where(used, first, 0), mask=tile < N)
    tl.store(end_ptr + tile, tl.where(used, end, 0), mask=tile < N)


TILES_KERNEL = Kernel(_tiles_kernel, changing=["A", "N", "placing"])


def num_tiles(num_assignments: int, num_experts: int, tile: int) -> int:
    """The largest number of tiles that the assignments can need."""
    return num_assignments // tile + min(num_experts, num_assignments)


def sorted_tiles(ids_TK: Tensor, num_experts: int, tile: int) -> SortedTiles:
    """The assignments `ids_TK` by expert, and tiles of at most `tile` rows of one expert. No host reads.

    Ids are 0 to E. Assignments to the sentinel E stand last and have no tile.
    """
    count, device = ids_TK.numel(), ids_TK.device
    tiles = num_tiles(count, num_experts, tile)
    order_A = torch.empty(count, dtype=torch.int64, device=device)
    expert_N, first_N, end_N = (torch.empty(tiles, dtype=torch.int32, device=device) for _ in range(3))
    placing = -(-count // _PLACED)
    launch(
        TILES_KERNEL,
        (placing + -(-tiles // _PLACED),),
        ids_TK.contiguous(),
        order_A,
        expert_N,
        first_N,
        end_N,
        count,
        num_experts,
        tiles,
        placing,
        tile,
        BLOCK=_PLACED,
        CHUNK=_CHUNK,
        BLOCK_E=power_of_two(num_experts),
        num_warps=8,
    )
    return SortedTiles(order_A, expert_N, first_N, end_N)
