"""The KV memory itself: keys and values of all layers in pages of a fixed number of tokens.

Shape legend: T packed query tokens, K key/value heads, C head channels.
"""

import torch
from torch import Tensor

from mbd_core.models.model_config import ModelConfig


class PagedKVCache:
    """Tensors `k`, `v` (layers, pages, page_size, K, C). A location is `page * page_size + offset`."""

    def __init__(
        self, config: ModelConfig, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        self.page_size = page_size
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = tuple(zip(self.k, self.v, strict=True))
        """Each layer's `k` and `v` (pages, page_size, K, C)."""
        self.by_location = tuple((k.flatten(0, 1), v.flatten(0, 1)) for k, v in self.layers)

    def write(self, layer: int, k: Tensor, v: Tensor, locations: Tensor) -> None:
        """Put keys and values (T, K, C) at `locations` (T,)."""
        keys, values = self.by_location[layer]
        keys.index_copy_(0, locations, k.to(keys.dtype))
        values.index_copy_(0, locations, v.to(values.dtype))

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Put what the pages `source` (n,) hold into the pages `target` (n,), in all layers."""
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]
