"""The Group-Aware Dual-Stream Mask as one predicate (Eqs. B.6 to B.9).

A training sequence is `[x_t^1; ...; x_t^n; x_0]`: one noisy stream per layout and one clean stream they share. A token
carries three numbers, and nothing else decides its visible keys:

    stream  0 for the clean tokens, 1..n for the noisy stream of layout n, -1 for padding
    block   beta, its block
    first   alpha, the first block of its noise-group; for a clean token its block + 1

    i sees j  iff  j is clean and beta(j) < alpha(i)                                        (B.8 and, for clean i, B.9)
              or   i, j share a noisy stream and a group (alpha(i) = alpha(j)) and beta(j) <= beta(i)           (B.7)

If several samples are packed into one sequence, i and j must also be of one sample.

Each mask comes in two forms of one predicate: a dense mask, and a function of places for a block mask (`..._sees`).
Native D2F is one noisy stream in one group: block 0 is the prompt, the response's blocks follow.

With one layout of two groups of two blocks (columns are keys):

             noisy 1 2 3 4   clean 1 2 3 4
    noisy 1        x               .
    noisy 2        x x             . .
    noisy 3            x           x x .
    noisy 4            x x         x x . .
    clean 1                        x
    clean 2                        x x
    clean 3                        x x x
    clean 4                        x x x x
"""

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from mbd_core.ops.attention.whole import Sees

IntArray = TypeVar("IntArray", Tensor, np.ndarray)


def dual_stream_mask(stream: Tensor, block: Tensor, first: Tensor, sample: Tensor | None = None) -> Tensor:
    """Visible pairs: (..., L) int tensors -> (..., L, L) bool; rows are queries.

    `sample`: each token's sample; without it all tokens belong to one sample. No other token sees padding (stream -1).
    A padded query sees itself, so that no softmax row is empty.
    """
    numbers = (stream, block, first, torch.zeros_like(stream) if sample is None else sample)
    query = tuple(column[..., :, None] for column in numbers)
    key = tuple(column[..., None, :] for column in numbers)
    return _dual_stream(query, key, _diagonal(stream))


def dual_stream_sees(stream: Tensor, block: Tensor, first: Tensor, sample: Tensor | None = None) -> Sees:
    """`dual_stream_mask` of (B, L) tensors, place by place."""
    numbers = (stream, block, first, torch.zeros_like(stream) if sample is None else sample)

    def sees(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = (tuple(column[row, place] for column in numbers) for place in (i, j))
        return _dual_stream(query, key, i == j)

    return sees


def block_causal_mask(block: Tensor) -> Tensor:
    """Only the clean half: (..., L) block indices -> (..., L, L), own and earlier blocks are seen (Eq. B.9)."""
    return block[..., None, :] <= block[..., :, None]


def whole_sequence_mask(stream: Tensor, sample: Tensor | None = None) -> Tensor:
    """Every token of a sample sees every other: (..., L) -> (..., L, L); `sample` and padding as above."""
    numbers = (stream, torch.zeros_like(stream) if sample is None else sample)
    query, key = tuple(n[..., :, None] for n in numbers), tuple(n[..., None, :] for n in numbers)
    return _whole_sequence(query, key, _diagonal(stream))


def whole_sequence_sees(stream: Tensor, sample: Tensor | None = None) -> Sees:
    """`whole_sequence_mask` of (B, L) tensors, place by place."""
    numbers = (stream, torch.zeros_like(stream) if sample is None else sample)

    def sees(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = (tuple(column[row, place] for column in numbers) for place in (i, j))
        return _whole_sequence(query, key, i == j)

    return sees


def sees_in_streams(query: tuple[IntArray, ...], key: tuple[IntArray, ...]) -> IntArray:
    """The predicate without padding: numbers (stream, block, first, sample) that broadcast -> bool."""
    (si, bi, fi, pi), (sj, bj, fj, pj) = query, key
    to_clean = (sj == 0) & (bj < fi) & (si >= 0)
    in_group = (si == sj) & (sj > 0) & (fi == fj) & (bj <= bi)
    return (to_clean | in_group) & (pi == pj)


def _dual_stream(query: tuple[Tensor, ...], key: tuple[Tensor, ...], diagonal: Tensor) -> Tensor:
    return sees_in_streams(query, key) | (diagonal & (query[0] < 0))


def _whole_sequence(query: tuple[Tensor, ...], key: tuple[Tensor, ...], diagonal: Tensor) -> Tensor:
    (si, pi), (sj, pj) = query, key
    return ((si >= 0) & (sj >= 0) & (pi == pj)) | (diagonal & (si < 0))


def _diagonal(stream: Tensor) -> Tensor:
    return torch.eye(stream.shape[-1], dtype=torch.bool, device=stream.device)
