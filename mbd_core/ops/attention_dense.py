"""Attention over whole sequences under a boolean mask, for training and for clean forwards.

Shape legend: B batch, L tokens, H query heads, K key/value heads, C head channels.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class DenseAttention:
    """Scaled dot-product attention where `mask` (B or 1, 1, L, L) is true; each query must see at least one key.

    What is added to the scores is made once for each dtype, so that all layers keep one tensor for the backward pass.
    """

    mask: Tensor
    _added: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B, L, H, C), keys and values (B, L, K, C) -> (B, L, H, C)."""
        is_grouped = False
        if q.shape[2] != k.shape[2]:  # compiled, the comparison is symbolic, and only a branch makes it a bool
            is_grouped = True
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=self.added(q.device.type, q.dtype),
            enable_gqa=is_grouped,
        )
        return out.transpose(1, 2)

    def added(self, kind: str, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of such queries: 0 where the mask is true and -inf elsewhere."""
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        if dtype not in self._added:
            zeros = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            self._added[dtype] = zeros.masked_fill_(~self.mask, -torch.inf)
        return self._added[dtype]
