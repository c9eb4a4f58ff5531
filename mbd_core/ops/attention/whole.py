"""Attention over whole sequences under a mask, for training and clean forwards: dense, and by FlexAttention.

FlexAttention never computes blocks of the mask without a visible pair. On a GPU torch compiles it into a kernel.
Elsewhere it runs as torch's eager reference, which has no gradients there.

Shape legend: B batch, L tokens, H query heads, K key/value heads, C head channels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@dataclass(frozen=True)
class DenseAttention:
    """Scaled dot-product attention where `mask` (B or 1, 1, L, L) is true; each query must see at least one key.

    The numbers added to the scores are made once for each dtype, so that all layers keep one tensor for the backward
    pass.
    """

    mask: Tensor
    _added: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (B, L, H, C), keys and values (B, L, K, C) -> (B, L, H, C)."""
        is_grouped = False
        if q.shape[2] != k.shape[2]:  # compiled, the comparison is symbolic, and only a branch makes it a bool
            is_grouped = True
        dtype = score_dtype(q.device.type, v.dtype)
        q, k, v_cast = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            out = F.scaled_dot_product_attention(q, k, v_cast, attn_mask=self.added(dtype), enable_gqa=is_grouped)
        return out.transpose(1, 2).to(v.dtype)

    def added(self, dtype: torch.dtype) -> Tensor:
        """The numbers added to the scores of queries of this dtype: 0 where the mask is true and -inf elsewhere."""
        if dtype not in self._added:
            zeros = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            self._added[dtype] = zeros.masked_fill_(~self.mask, -torch.inf)
        return self._added[dtype]


def score_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of attention over values of `dtype` on a device of the type `kind`: autocast's, if autocast is on.

    On a CPU it is float32 instead of bfloat16, in which a backward pass takes three times as long.
    """
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return torch.float32 if (kind, dtype) == ("cpu", torch.bfloat16) else dtype


Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query may attend to a key, given a sample, a head, the query's place and the key's place."""


COMPILATIONS = 64
"""The largest number of compiled variants of a function."""


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
        # inside a compiled layer it is compiled with the layer
        on_gpu = q.device.type == "cuda" and not torch.compiler.is_compiling()
        attend: Any = _compiled(flex_attention, fullgraph=True) if on_gpu else flex_attention
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
def _compiled(function: Callable[..., Any], *, fullgraph: bool = False) -> Callable[..., Any]:
    """The function compiled for all lengths: sizes other than 1 are symbols from its first compilation on.

    Each number of samples, each kind of mask, and gradients or none need a compilation of their own, so torch's limit
    of 8 is too low. Past the limit the kernel would silently give way to its eager reference, which holds all pairs of
    tokens in memory; `fullgraph` makes that an error. The same holds for a block mask.
    """
    return in_many_variants(torch.compile(function, dynamic=True, fullgraph=fullgraph))


def in_many_variants(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function with up to `COMPILATIONS` variants."""

    def call(*args: Any, **settings: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=COMPILATIONS):
            return compiled(*args, **settings)

    return call
