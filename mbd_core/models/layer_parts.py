"""The parts of layers: attention and sums over ranks as callables, rows apart, products of one input, the norm.

Shape legend: ... any leading shape, H query heads, K key/value heads, C head channels.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mbd_core.ops.layer.int8 import Int8Part

Reduce = Callable[[Tensor], Tensor]


class Attend(Protocol):
    """Attention of one layer: queries (..., H, C), keys and values (..., K, C) -> (..., H, C), scaled by C^-1/2."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def pieces(x: Tensor, split: Sequence[int] | None) -> list[Tensor]:
    """`[x]`, or with `split` the rows of these lengths along the first dimension.

    Rows are copied, because a matrix product may round differently if its input is aligned differently in memory.
    """
    return [x] if split is None else [row.clone() for row in x.split(list(split))]


def join(rows: Sequence[Tensor]) -> Tensor:
    """The inverse of `pieces`."""
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows))


def together(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """What each of the linear layers gives for `x`; the parts of a joint product are computed at once."""
    first = layers[0]
    if not isinstance(first, Int8Part):
        return [layer(x) for layer in layers]
    joint_out = first.joint(x)
    return [layer.take(joint_out) for layer in layers if isinstance(layer, Int8Part)]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and cast back before the gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
