"""LoRA adapters beside a decoder's weights: each token of a forward uses its own adapter, or none.

A product `W x` becomes `W x + B A x`, with the A and B of the token's adapter. Resident adapters stand in slots of
stacked tensors, so shapes never change. A of all slots is one product; the results of slots other than the token's are
multiplied by zero; B of all slots is another product. A token without an adapter gets exact zeros. Products with the
same input (q, k and v; gate and up) are stacked too: their B is one block-diagonal matrix.

Adapters change the projections of the attention and of the dense MLP or the shared experts. A tensor-parallel rank
holds the rows of B or the columns of A that belong to its part of W. Its product is a partial sum exactly where W's
is, so no other sum is needed.

Shape legend: ... or T tokens, S slots, J products that read the same input, R the largest rank, I input channels, O
output channels of all J.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shard import Shard, split_dim

ProductGroup = Literal["qkv", "out", "gate_up", "down"]
Adapt = Callable[[str, Tensor], Tensor]
"""The adapters' part of a layer's product, by the product's name and its input."""

PRODUCTS: dict[ProductGroup, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
PLACE = {product: (group, at) for group, products in PRODUCTS.items() for at, product in enumerate(products)}


@dataclass(frozen=True)
class Adapter:
    """One adapter of a whole model: A (r, I) and B (O, r) by the decoder's module. B contains the scale.

    `ar_mode`: the adapted model has an autoregressive mode. `block_size`: the blocks that it was trained in, `None` if
    nothing says so.
    """

    rank: int
    factors: Mapping[str, tuple[Tensor, Tensor]]
    ar_mode: bool = False
    block_size: int | None = None


def adapted_modules(config: ModelConfig) -> Iterator[tuple[int, str, str]]:
    """The modules that an adapter can change, each as layer number, product and module name in the decoder.

    Raises `ValueError` for Gemma, whose layers take no adapters.
    """
    if config.gemma is not None:
        raise ValueError(f"adapters cannot be loaded: the layers of {config.architecture} take none here")
    for layer, product in itertools.product(range(config.num_layers), PLACE):
        group, _ = PLACE[product]
        parent = "self_attn" if group in ("qkv", "out") else "mlp"
        if parent == "mlp" and config.is_sparse(layer):
            assert config.moe is not None
            if not config.moe.shared_size:
                continue
            parent = "mlp.shared_experts"
        yield layer, product, f"model.layers.{layer}.{parent}.{product}"


def adapted(out: Tensor, adapt: Adapt | None, product: str, x: Tensor) -> Tensor:
    """The product `out` of `x` plus the adapters' part."""
    return out if adapt is None else out + adapt(product, x)


class StackedFactors:
    """A and B of all slots, for the products of one group in one layer."""

    def __init__(self, like: Tensor, *, num_slots: int, rank: int, inputs: int, outputs: Sequence[int]) -> None:
        self._a_JSRI = like.new_zeros((len(outputs), num_slots, rank, inputs))
        self._b_JSRO = like.new_zeros((len(outputs), num_slots, rank, sum(outputs)))
        ends = list(itertools.accumulate(outputs, initial=0))
        self._columns = [slice(*bounds) for bounds in itertools.pairwise(ends)]
        self.right = self._b_JSRO.flatten(0, 2)
        self._left = self._a_JSRI.flatten(0, 2)

    def write(self, slot: int, at: int, a: Tensor, b: Tensor) -> None:
        """Put A (r, I) and B (O, r) of product number `at` into a slot that is empty."""
        self._a_JSRI[at, slot, : len(a)] = a.to(self._a_JSRI)
        self._b_JSRO[at, slot, : len(a), self._columns[at]] = b.t().to(self._b_JSRO)

    def clear(self, slot: int) -> None:
        self._a_JSRI[:, slot] = 0
        self._b_JSRO[:, slot] = 0

    def inner(self, x: Tensor, chosen_S: Tensor) -> Tensor:
        """A times `x` (..., I), as (..., J S R), zero in slots that are not chosen (..., S). It is the input of
        `right` (J S R, O)."""
        inner = F.linear(x, self._left).unflatten(-1, self._a_JSRI.shape[:3])
        return (inner * chosen_S[..., None, :, None]).flatten(-3)

    def product(self, at: int, x: Tensor, chosen_S: Tensor) -> Tensor:
        """The adapters' part of product number `at` alone (..., its output channels). This is the definition."""
        inner = F.linear(x, self._a_JSRI[at].flatten(0, 1)).unflatten(-1, self._a_JSRI.shape[1:3])
        return (inner * chosen_S[..., None]).flatten(-2) @ self._b_JSRO[at, ..., self._columns[at]].flatten(0, 1)


class AdapterSlots:
    """Slots 1 to `num_slots` for adapters of rank at most `max_rank`, beside a rank's part of a model.

    A token of slot 0 has no adapter. `config` has the part's sizes, `like` the weights' device and dtype. Nothing is
    ever reallocated, because CUDA graphs read the slots at their address.
    """

    def __init__(self, config: ModelConfig, shard: Shard, like: Tensor, *, num_slots: int, max_rank: int) -> None:
        self.num_slots, self.max_rank, self._shard = num_slots, max_rank, shard
        c = config
        attended = c.num_heads * c.head_dim
        attention: dict[ProductGroup, tuple[int, tuple[int, ...]]] = {
            "qkv": (c.hidden_size, (attended, *[c.num_kv_heads * c.head_dim] * 2)),
            "out": (attended, (c.hidden_size,)),
        }
        with torch.inference_mode(False):
            self.layers: list[dict[ProductGroup, StackedFactors]] = []
            for layer in range(c.num_layers):
                width = c.moe.shared_size if c.moe is not None and c.is_sparse(layer) else c.intermediate_size
                mlp: dict[ProductGroup, tuple[int, tuple[int, ...]]] = {
                    "gate_up": (c.hidden_size, (width, width)),
                    "down": (width, (c.hidden_size,)),
                }
                groups = {**attention, **(mlp if width else {})}
                self.layers.append(
                    {
                        group: StackedFactors(like, num_slots=num_slots, rank=max_rank, inputs=inputs, outputs=outputs)
                        for group, (inputs, outputs) in groups.items()
                    }
                )
            self._numbers_S = torch.arange(1, num_slots + 1, device=like.device)
        self._dtype = like.dtype
        self._modules = {module: (layer, product) for layer, product, module in adapted_modules(config)}

    def write(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter, of at most `max_rank`, into an empty slot."""
        assert adapter.rank <= self.max_rank and 1 <= slot <= self.num_slots
        for module, (a, b) in adapter.factors.items():
            layer, product = self._modules[module]
            group, at = PLACE[product]
            dim = split_dim(f"{module}.weight")
            size, rank = self._shard.size, self._shard.rank
            a = a.chunk(size, dim=1)[rank] if dim == 1 else a
            b = b.chunk(size, dim=0)[rank] if dim == 0 else b
            self.layers[layer][group].write(slot - 1, at, a, b)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for groups in self.layers:
            for factors in groups.values():
                factors.clear(slot - 1)

    def choose(self, slot_T: Tensor) -> "TokenAdapters":
        """The adapters of a forward whose tokens use the slots `slot_T` (T,)."""
        return TokenAdapters(self.layers, (slot_T[:, None] == self._numbers_S).to(self._dtype))


@dataclass(frozen=True)
class TokenAdapters:
    """The adapter of each token of a forward: `chosen_TS` is 1 in the token's slot and zero elsewhere."""

    layers: Sequence[Mapping[ProductGroup, StackedFactors]]
    chosen_TS: Tensor

    def split(self, lengths: Sequence[int] | None) -> "list[TokenAdapters]":
        """The `TokenAdapters` of each row of these lengths; `None`: all tokens are one row."""
        rows = [self.chosen_TS] if lengths is None else [r.clone() for r in self.chosen_TS.split(list(lengths))]
        return [replace(self, chosen_TS=row) for row in rows]

    def of(self, layer: int) -> Adapt:
        """The adapters' part of a layer's products, each by itself."""

        def adapt(product: str, x: Tensor) -> Tensor:
            group, at = PLACE[product]
            return self.layers[layer][group].product(at, x, self.chosen_TS)

        return adapt

    def joint(self, layer: int, group: ProductGroup, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Two matrices whose product (T, O) is the adapters' part of a group's products, side by side."""
        factors = self.layers[layer][group]
        return factors.inner(x_TI, self.chosen_TS), factors.right
