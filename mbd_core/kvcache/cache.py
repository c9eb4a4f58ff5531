"""The KV memory itself: keys and values of all layers in pages of a fixed number of tokens.

Shape legend: T packed query tokens, K key/value heads, C head channels.
"""

import torch
from torch import Tensor

from mbd_core.models.config import ModelConfig


class PagedKVCache:
    """Tensors `k`, `v` (layers, pages, page_size, K, C). A location is `page * page_size + offset`."""

    def __init__(
        self, config: ModelConfig, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.page_size = page_size
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, k: Tensor, v: Tensor, locations: Tensor) -> None:
        """Put keys and values (T, K, C) at `locations` (T,)."""
        self.k[layer].flatten(0, 1)[locations] = k.to(self.k.dtype)
        self.v[layer].flatten(0, 1)[locations] = v.to(self.v.dtype)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Put what the pages `source` (n,) hold into the pages `target` (n,), in all layers."""
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]
