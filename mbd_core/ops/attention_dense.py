"""Attention over whole sequences under a boolean mask, for training and for clean forwards.

Shape legend: B batch, L tokens, H query heads, K key/value heads, C head channels.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class DenseAttention:
    """Scaled dot-product attention where `mask` (B or 1, 1, L, L) is true; each query must see at least one key."""

    mask: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B, L, H, C), keys and values (B, L, K, C) -> (B, L, H, C)."""
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=self.mask,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)
