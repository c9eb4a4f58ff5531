"""Attention in groups of queries that share their keys: only the pairs within a group are computed.

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

from mbd_core.ops.attention.whole import DenseAttention, score_dtype

PADDING = 1.25
"""The largest number of computed pairs of a part, as a multiple of its groups' own pairs."""


@dataclass(frozen=True)
class QueryGroup:
    """Queries (W) and keys (M) as flat places among B x L tokens, and which key each query sees (W, M)."""

    queries: np.ndarray
    keys: np.ndarray
    sees: np.ndarray


@dataclass(frozen=True)
class GroupedAttention:
    """Scaled dot-product attention within groups. A token that is no group's query gets zeros.

    `queries` and `keys` are flat places among B x L tokens, part by part: (N, W) and (N, M) of each, as its mask
    (N, 1, W, M) says. `places` (B x L): the place of each token's result among the results of all parts, which a row
    of zeros follows.
    """

    parts: tuple[DenseAttention, ...]
    queries: Tensor
    keys: Tensor
    places: Tensor

    @classmethod
    def of(cls, groups: Sequence[QueryGroup], num_tokens: int, device: torch.device) -> Self:
        """The attention of these groups; a token is a query of at most one.

        Padded queries and keys are token 0. A padded query sees one key, and its result goes nowhere.
        """
        none = np.zeros(0, dtype=np.int64)
        masks, all_queries, all_keys = [], [none], [none]
        places, start = np.full(num_tokens, -1), 0
        for alike in _alike(groups):
            width, length = (max(sizes) for sizes in zip(*(group.sees.shape for group in alike), strict=True))
            queries, keys = (np.zeros((len(alike), size), dtype=np.int64) for size in (width, length))
            sees = np.zeros((len(alike), 1, width, length), dtype=bool)
            for number, group in enumerate(alike):
                num_queries, num_keys = group.sees.shape
                queries[number, :num_queries], keys[number, :num_keys] = group.queries, group.keys
                sees[number, 0, :num_queries, :num_keys] = group.sees
                sees[number, 0, num_queries:, 0] = True
                places[group.queries] = start + number * width + np.arange(num_queries)
            start += queries.size
            masks.append(sees)
            all_queries.append(queries.reshape(-1))
            all_keys.append(keys.reshape(-1))
        places[places < 0] = start
        columns = (np.concatenate(all_queries), np.concatenate(all_keys), places)
        at_queries, at_keys, at_results = (torch.from_numpy(column).to(device) for column in columns)
        parts = tuple(DenseAttention(torch.from_numpy(sees).to(device)) for sees in masks)
        return cls(parts, at_queries, at_keys, at_results)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B, L, H, C), keys and values (B, L, K, C) -> (B, L, H, C)."""
        shapes, dtype = [part.mask.shape for part in self.parts], score_dtype(v.device.type, v.dtype)
        queries = _rows(self.queries, q).split([num * width for num, _, width, _ in shapes])
        keys_and_values = torch.cat((k.to(dtype), v.to(dtype)), dim=-1)
        pairs = _rows(self.keys, keys_and_values).split([num * keys for num, *_, keys in shapes])
        outputs = []
        for part, own_queries, own_pairs in zip(self.parts, queries, pairs, strict=True):
            num, _, width, length = part.mask.shape
            own_keys, own_values = own_pairs.unflatten(0, (num, length)).chunk(2, dim=-1)
            out = part(layer, own_queries.unflatten(0, (num, width)), own_keys, own_values)
            outputs.append(out.flatten(0, 1).flatten(1).to(v.dtype))
        zeros = v.new_zeros(1, q.shape[-2] * q.shape[-1])
        return F.embedding(self.places, torch.cat([*outputs, zeros])).view(q.shape)


def _rows(places: Tensor, x: Tensor) -> Tensor:
    """Tokens of x (B, L, H, C) at flat places (N) -> (N, H, C).

    On a CPU an embedding's gradient sums rows fast, and an index's does not.
    """
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
