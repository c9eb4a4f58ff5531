"""Attention in groups of queries that share their keys: only pairs of a group are computed.

A dense mask over a sequence of many short streams is nearly empty. Here each group's queries and keys are gathered,
groups of similar sizes are computed together, and the results return to their places.

Shape legend: B batch, L tokens, H query heads, K key/value heads, C head channels; N groups of a part, with W queries
and M keys each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.ops.attention.whole import DenseAttention

PADDING = 1.25
"""The largest number of computed pairs of a part, as a multiple of its groups' own pairs."""


@dataclass(frozen=True)
class QueryGroup:
    """Queries (W) and keys (M) as flat places among B x L tokens, and which key each query sees (W, M)."""

    queries: np.ndarray
    keys: np.ndarray
    sees: np.ndarray


@dataclass(frozen=True)
class GroupedPart:
    """Groups of similar sizes: their queries (N, W), their keys (N, M), and the attention under their masks."""

    queries: Tensor
    keys: Tensor
    attend: DenseAttention

    @classmethod
    def of(cls, groups: Sequence[QueryGroup], device: torch.device) -> Self:
        """Padded queries and keys are token 0; a padded query sees one key, and its result goes nowhere."""
        width, length = (max(sizes) for sizes in zip(*(group.sees.shape for group in groups), strict=True))
        queries, keys = (np.zeros((len(groups), size), dtype=np.int64) for size in (width, length))
        sees = np.zeros((len(groups), width, length), dtype=bool)
        for number, group in enumerate(groups):
            num_queries, num_keys = group.sees.shape
            queries[number, :num_queries], keys[number, :num_keys] = group.queries, group.keys
            sees[number, :num_queries, :num_keys] = group.sees
            sees[number, num_queries:, 0] = True
        moved = (torch.from_numpy(column).to(device) for column in (queries, keys, sees[:, None]))
        return cls(next(moved), next(moved), DenseAttention(next(moved)))


@dataclass(frozen=True)
class GroupedAttention:
    """Scaled dot-product attention within groups. A token that is no group's query gets zeros.

    `places` (B x L): the place of each token's result among the results of all parts, one behind the other; behind
    them stands a row of zeros.
    """

    parts: tuple[GroupedPart, ...]
    places: Tensor

    @classmethod
    def of(cls, groups: Sequence[QueryGroup], num_tokens: int, device: torch.device) -> Self:
        """The attention of these groups; a token is a query of at most one."""
        parts, places, start = [], np.full(num_tokens, -1), 0
        for alike in _alike(groups):
            part = GroupedPart.of(alike, device)
            width = part.queries.shape[1]
            for number, group in enumerate(alike):
                places[group.queries] = start + number * width + np.arange(len(group.queries))
            start += part.queries.numel()
            parts.append(part)
        places[places < 0] = start
        return cls(tuple(parts), torch.from_numpy(places).to(device))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B, L, H, C), keys and values (B, L, K, C) -> (B, L, H, C)."""
        outputs = [
            part.attend(
                layer, *(_rows(places, x) for places, x in ((part.queries, q), (part.keys, k), (part.keys, v)))
            )
            .flatten(0, 1)
            .flatten(1)
            for part in self.parts
        ]
        zeros = v.new_zeros(1, q.shape[-2] * q.shape[-1])
        return F.embedding(self.places, torch.cat([*(out.to(zeros) for out in outputs), zeros])).view(q.shape)


def _rows(places: Tensor, x: Tensor) -> Tensor:
    """Tokens of x (B, L, H, C) at places (N, W) -> (N, W, H, C). On a CPU an embedding's gradient sums rows fast, and
    an index's does not."""
    return F.embedding(places, x.flatten(0, 1).flatten(1)).unflatten(-1, x.shape[-2:])


def _alike(groups: Sequence[QueryGroup]) -> list[list[QueryGroup]]:
    """The groups in lists of similar sizes, so that padding stays below `PADDING`."""
    found: list[list[QueryGroup]] = []
    pairs = width = length = 0
    for group in sorted(groups, key=lambda each: (each.sees.shape, int(each.queries[0])), reverse=True):
        num_queries, num_keys = group.sees.shape
        wider, longer, more = max(width, num_queries), max(length, num_keys), pairs + group.sees.size
        if found and wider * longer * (len(found[-1]) + 1) <= PADDING * more:
            found[-1].append(group)
            pairs, width, length = more, wider, longer
        else:
            found.append([group])
            pairs, width, length = group.sees.size, num_queries, num_keys
    return found
