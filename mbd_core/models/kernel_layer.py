"""A decoder layer of few CUDA kernels: a `FusedLayer` whose work between the products is done by Triton kernels.

norm + residual | qkv | heads -> cache | attention | o_proj | norm + residual | router, choice, tiles, experts

A layer's last sum is added by the norm that follows it, in the next layer or after the last layer. If tensor-parallel
ranks read each other's memory, that norm also adds the ranks' parts.

Shape legend: T packed tokens, D hidden, H query heads, K key/value heads, C head channels, L places of a cache.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from mbd_core.models.decoder import Decoder, DecoderLayer
from mbd_core.models.fused_layer import FusedLayer, FusedSwiGLU, Norm, Rotations
from mbd_core.models.lora import TokenAdapters
from mbd_core.models.products import Int8Product, Product
from mbd_core.ops.layer.heads import store_heads
from mbd_core.ops.layer.residual_norm import ExpertParts, RankParts, add_norm, sum_experts
from mbd_core.ops.layer.swiglu import gated

Sum = Literal[0, 1]
"""The two sums over ranks in a layer: after o_proj, after the MLP."""


@runtime_checkable
class SharedReduce(Protocol):
    """A `Reduce` whose ranks can read each other's parts: the kernel that needs a sum adds the parts itself."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def place(self, number: Sum, like: Tensor) -> Tensor | None:
        """Memory of the shape and dtype of `like` for this rank's part, `None` if it does not fit. It may be
        written again after a `share` of the other sum."""

    def share(self, number: Sum) -> RankParts:
        """The parts of all ranks, once every rank has written its part."""


@runtime_checkable
class PagedAttend(Protocol):
    """Attention over a cache into which the caller has already written this forward's keys and values."""

    def places(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (L, K, C) of a layer, and the place (T,) of each token."""

    def attend_stored(self, layer: int, q: Tensor) -> Tensor:
        """Queries (T, H, C) -> (T, H, C)."""


@dataclass(frozen=True)
class Stream:
    """The residual stream: `x_TD` plus the terms that are not added yet: `part_TD`, and the sums of `ranks` and
    `experts`."""

    x_TD: Tensor
    part_TD: Tensor | None = None
    ranks: RankParts | None = None
    experts: ExpertParts | None = None

    def normed(self, norm: Norm) -> tuple[Tensor, Tensor]:
        """The whole sum (T, D) and its norm (T, D)."""
        return add_norm(self.x_TD, norm.gain, norm.eps, part_TD=self.part_TD, ranks=self.ranks, experts=self.experts)

    def total(self) -> Tensor:
        """The whole sum (T, D)."""
        if self.part_TD is None and self.ranks is None and self.experts is None:
            return self.x_TD
        return add_norm(self.x_TD, None, 0.0, part_TD=self.part_TD, ranks=self.ranks, experts=self.experts)[0]


class KernelLayer(FusedLayer):
    """A layer in the form for CUDA; its numbers are those of `FusedLayer` except for rounding."""

    def __init__(self, layer: DecoderLayer, model: Decoder) -> None:
        super().__init__(layer, model)
        self._shared = model.reduce if isinstance(model.reduce, SharedReduce) else None

    def advance(
        self,
        stream: Stream,
        rotations: Rotations,
        positions_T: Tensor,
        attend: PagedAttend,
        index: int,
        adapters: TokenAdapters | None,
        live_T: Tensor | None,
    ) -> Stream:
        """The residual stream after this layer."""
        x_TD, inner_TD = stream.normed(self._input_norm)
        qkv = self._qkv(inner_TD)
        if adapters is not None:
            qkv.addmm_(*adapters.joint(index, "qkv", inner_TD))
        keys_LKC, values_LKC, places_T = attend.places(index)
        norm = self._head_norm
        q_THC = store_heads(
            qkv,
            None if norm is None else norm.gain,
            rotations.table_P2C,
            positions_T,
            keys_LKC=keys_LKC,
            values_LKC=values_LKC,
            places_T=places_T,
            num_rotated=rotations.num_rotated,
            eps=0.0 if norm is None else norm.eps,
        )
        if (scale_T11 := rotations.query_scale_at(positions_T)) is not None:
            q_THC = q_THC.mul_(scale_T11)
        attended = attend.attend_stored(index, q_THC).flatten(1)
        place_TD = self._place(0, x_TD)
        out_TD = torch.mm(attended, _weight_IO(self._out), out=place_TD)
        if adapters is not None:
            out_TD.addmm_(*adapters.joint(index, "out", attended))
        x_TD, inner_TD = self._over_ranks(0, x_TD, out_TD, place_TD).normed(self._output_norm)
        return self._mlp(x_TD, inner_TD, adapters, index, live_T)

    def _place(self, number: Sum, x_TD: Tensor) -> Tensor | None:
        """The memory for this rank's part of a sum, if the other ranks read it there."""
        return None if self._shared is None else self._shared.place(number, x_TD)

    def _over_ranks(self, number: Sum, x_TD: Tensor, part_TD: Tensor, place_TD: Tensor | None) -> Stream:
        """The stream `x_TD` with the sum of the ranks' parts. `part_TD` is this rank's part, in `place_TD` if that is
        given."""
        if place_TD is not None:
            assert self._shared is not None
            return Stream(x_TD, ranks=self._shared.share(number))
        return Stream(x_TD, part_TD if self._reduce is None else self._reduce(part_TD))

    def _mlp(
        self, x_TD: Tensor, inner_TD: Tensor, adapters: TokenAdapters | None, index: int, live_T: Tensor | None
    ) -> Stream:
        """The stream with the MLP of `inner_TD` added, summed over the ranks if each rank has a part."""
        fuses = self._experts is not None and self._experts.fuses(len(inner_TD))
        shares = fuses and self._swiglu is not None and adapters is None  # adapters change no routed expert
        place_TD = self._place(1, x_TD)
        part_TD: Tensor | None = None
        if self._swiglu is not None and not shares:
            out_TD = place_TD if self._experts is None else None
            part_TD = _swiglu(self._swiglu, inner_TD, adapters, index, out_TD)
        experts: ExpertParts | None = None
        if self._experts is not None:
            if fuses:
                experts = self._experts.parts(inner_TD, live_T, shares=shares)
            else:
                routed = self._experts.routed(inner_TD, live_T)
                part_TD = routed if part_TD is None else part_TD.add_(routed)
        if self._reduce is None:
            return Stream(x_TD, part_TD, experts=experts)
        if experts is not None:
            part_TD = sum_experts(experts, x_TD.dtype, part_TD=part_TD, out_TD=place_TD)
        assert part_TD is not None
        if place_TD is not None and part_TD is not place_TD:
            place_TD.copy_(part_TD)
        return self._over_ranks(1, x_TD, part_TD, place_TD)


def _swiglu(
    mlp: FusedSwiGLU, x_TD: Tensor, adapters: TokenAdapters | None, layer: int, out_TD: Tensor | None
) -> Tensor:
    """The MLP of `x_TD`, written to `out_TD` if it is given."""
    gate_up = mlp.gate_up(x_TD)
    if adapters is not None:
        gate_up.addmm_(*adapters.joint(layer, "gate_up", x_TD))
    inner_TF = gated(gate_up)
    part_TD = torch.mm(inner_TF, _weight_IO(mlp.down), out=out_TD)
    return part_TD if adapters is None else part_TD.addmm_(*adapters.joint(layer, "down", inner_TF))


def _weight_IO(product: Product | Int8Product) -> Tensor:
    assert isinstance(product, Product), "a GPU computes no int8"
    return product.weight_IO
