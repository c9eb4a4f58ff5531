"""FlexAttention over whole sequences: blocks of the mask without a visible pair are never computed.

On a GPU torch compiles it into a kernel; elsewhere it runs as torch's eager reference, which has no gradients there.

Shape legend: B batch, L tokens, H query heads, K key/value heads, C head channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of a sample, a head, a query's and a key's place: whether the query may attend to the key."""


@dataclass(frozen=True)
class FlexAttention:
    """Scaled dot-product attention under a block mask; each query must see at least one key."""

    mask: BlockMask

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B, L, H, C), keys and values (B, L, K, C) -> (B, L, H, C)."""
        q, k = (
            q.to(v.dtype),
            k.to(v.dtype),
        )  # norms may leave them in float32, and autocast has no rule for flex_attention
        attend: Any = _compiled(flex_attention) if q.device.type == "cuda" else flex_attention
        out: Tensor = attend(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            block_mask=self.mask,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)


def block_mask(sees: Sees, *, batch: int, length: int, device: torch.device) -> BlockMask:
    """The block mask of a predicate, the same for all heads. Compiled on a GPU, so that no (L, L) tensor exists."""
    create: Callable[..., BlockMask] = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return create(sees, batch, None, length, length, device=device)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
