"""The Group-Aware Dual-Stream Mask as one predicate (Eqs. B.6 to B.9), and how training attends under it.

A training sequence is `[x_t^1; ...; x_t^n; x_0]`: one noisy stream per layout and one clean stream they share. A token
carries three numbers, and who sees whom follows from them alone:

    stream  0 for the clean tokens, 1..n for the noisy stream of layout n, -1 for padding
    block   beta, its block
    first   alpha, the first block of its noise-group; for a clean token its block + 1

    i sees j  iff  j is clean and beta(j) < alpha(i)                                        (B.8 and, for clean i, B.9)
              or   i, j share a noisy stream and a group (alpha(i) = alpha(j)) and beta(j) <= beta(i)           (B.7)

Where several samples are packed into one sequence, i and j must be of one sample besides.

Each mask comes in two forms of one predicate: a dense one, and a function of places for a block mask (`..._sees`).
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

from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mbd_core.models.layer_parts import Attend
from mbd_core.multitf.config import AttentionChoice
from mbd_core.multitf.states.sample import MultiTFBatch
from mbd_core.ops.attention.whole import DenseAttention, FlexAttention, block_mask

Places = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of a row of the batch, a head, a query's and a key's place: whether the query sees the key."""


def dual_stream_mask(stream: Tensor, block: Tensor, first: Tensor, sample: Tensor | None = None) -> Tensor:
    """Who may attend to whom: (..., L) int tensors -> (..., L, L) bool, rows are queries.

    `sample`: which sample each token is of; without it all are of one. Padding (stream -1) is seen by nobody else; a
    padded query sees itself, so that no softmax row is empty.
    """
    numbers = (stream, block, first, torch.zeros_like(stream) if sample is None else sample)
    query = tuple(column[..., :, None] for column in numbers)
    key = tuple(column[..., None, :] for column in numbers)
    return _dual_stream(query, key, _diagonal(stream))


def dual_stream_sees(stream: Tensor, block: Tensor, first: Tensor, sample: Tensor | None = None) -> Places:
    """`dual_stream_mask` of (B, L) tensors, place by place."""
    numbers = (stream, block, first, torch.zeros_like(stream) if sample is None else sample)

    def sees(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = (tuple(column[row, place] for column in numbers) for place in (i, j))
        return _dual_stream(query, key, i == j)

    return sees


def block_causal_mask(block: Tensor) -> Tensor:
    """The clean half alone: (..., L) block indices -> (..., L, L), own and earlier blocks are seen (Eq. B.9)."""
    return block[..., None, :] <= block[..., :, None]


def whole_sequence_mask(stream: Tensor, sample: Tensor | None = None) -> Tensor:
    """Every token of a sample sees every other: (..., L) -> (..., L, L); `sample` and padding as above."""
    numbers = (stream, torch.zeros_like(stream) if sample is None else sample)
    query, key = tuple(n[..., :, None] for n in numbers), tuple(n[..., None, :] for n in numbers)
    return _whole_sequence(query, key, _diagonal(stream))


def whole_sequence_sees(stream: Tensor, sample: Tensor | None = None) -> Places:
    """`whole_sequence_mask` of (B, L) tensors, place by place."""
    numbers = (stream, torch.zeros_like(stream) if sample is None else sample)

    def sees(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query, key = (tuple(column[row, place] for column in numbers) for place in (i, j))
        return _whole_sequence(query, key, i == j)

    return sees


def _dual_stream(query: tuple[Tensor, ...], key: tuple[Tensor, ...], diagonal: Tensor) -> Tensor:
    (si, bi, fi, pi), (sj, bj, fj, pj) = query, key
    to_clean = (sj == 0) & (bj < fi) & (si >= 0)
    in_group = (si == sj) & (sj > 0) & (fi == fj) & (bj <= bi)
    return ((to_clean | in_group) & (pi == pj)) | (diagonal & (si < 0))


def _whole_sequence(query: tuple[Tensor, ...], key: tuple[Tensor, ...], diagonal: Tensor) -> Tensor:
    (si, pi), (sj, pj) = query, key
    return ((si >= 0) & (sj >= 0) & (pi == pj)) | (diagonal & (si < 0))


def _diagonal(stream: Tensor) -> Tensor:
    return torch.eye(stream.shape[-1], dtype=torch.bool, device=stream.device)


# How training attends: FlexAttention under a block mask on a GPU, a dense mask elsewhere, from one predicate.
#
# A dense mask computes every pair of tokens, so it makes the shared clean stream dearer than separate sequences where
# these are long; a block mask skips the pairs between layouts (benchmarks/README.md has the counts).

KEPT_MASKS = 32
"""Block masks that are kept, of the layout shapes that were used last."""


class TrainingAttention:
    """The attention of a run: `choice`, and on which device.

    A block mask is built once for each layout shape: the streams, blocks and noise-groups of a batch's tokens. Raises
    `ValueError` for `flex` on a device where it has no gradients.
    """

    def __init__(self, choice: AttentionChoice, device: torch.device) -> None:
        if choice == "flex" and device.type != "cuda":
            raise ValueError(f"attention=flex trains on a GPU alone, and this device is {device.type}; choose dense")
        self.kind: Literal["dense", "flex"] = "flex" if choice != "dense" and device.type == "cuda" else "dense"
        self._is_choice = choice != "auto"
        self._masks: OrderedDict[bytes, BlockMask] = OrderedDict()

    def describe(self) -> str:
        """What is used and why, for the line that a run begins with."""
        if self._is_choice:
            return f"{self.kind} attention, as asked"
        return "flex attention" if self.kind == "flex" else "dense attention (flex needs a GPU)"

    def of(self, batch: MultiTFBatch, *, whole: bool = False) -> Attend:
        """The attention of one batch: the Group-Aware Dual-Stream Mask, or with `whole` no mask but the padding."""
        if self.kind == "flex":
            return FlexAttention(self._block_mask(batch, whole=whole))
        sample = places_of_samples(batch)
        numbers = (batch.stream, batch.block, batch.first)
        mask = whole_sequence_mask(batch.stream, sample) if whole else dual_stream_mask(*numbers, sample)
        return DenseAttention(mask[:, None])

    def _block_mask(self, batch: MultiTFBatch, *, whole: bool) -> BlockMask:
        numbers = (batch.stream, batch.block, batch.first, places_of_samples(batch))
        content = torch.stack(numbers).cpu().numpy().tobytes()
        key = sha256(content + bytes([whole]) + str((*batch.stream.shape, batch.stream.device)).encode()).digest()
        if key not in self._masks:
            sees = whole_sequence_sees(batch.stream, numbers[-1]) if whole else dual_stream_sees(*numbers)
            samples, length = batch.stream.shape
            self._masks[key] = block_mask(sees, batch=samples, length=length, device=batch.stream.device)
            if len(self._masks) > KEPT_MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(key)
        return self._masks[key]


def places_of_samples(batch: MultiTFBatch) -> Tensor:
    """Of each token its sample's place in the row, from 0: batches of one shape have equal ones (S, L)."""
    places = torch.zeros_like(batch.sample)
    places[:, 1:] = (batch.sample[:, 1:] != batch.sample[:, :-1]).cumsum(-1)
    return places
