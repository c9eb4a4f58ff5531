"""A decoder layer of few CUDA kernels: a `FusedLayer` whose work between the products is done by Triton kernels.

    norm + residual | qkv | heads -> cache | attention | o_proj | norm + residual | router, choice, tiles, experts

What a layer adds last is added by the norm that follows it, in the next layer or behind the last one.

Shape legend: T packed tokens, D hidden, H query heads, K key/value heads, C head channels, L places of a cache.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.nn import functional as F

from mbd_core.models.fused_layer import FusedLayer, FusedSwiGLU, Norm, Rotations
from mbd_core.models.lora import TokenAdapters
from mbd_core.ops.heads_triton import store_heads
from mbd_core.ops.residual_norm import ExpertParts, add_norm, sum_experts
from mbd_core.ops.swiglu_triton import gated


@runtime_checkable
class PagedAttend(Protocol):
    """Attention over a cache into which the caller has written this forward's keys and values itself."""

    def places(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (L, K, C) of a layer, and the place (T,) of each token."""

    def attend_stored(self, layer: int, q: Tensor) -> Tensor:
        """Queries (T, H, C) -> (T, H, C)."""


@dataclass(frozen=True)
class Stream:
    """The residual stream: `x_TD` and, not added yet, `part_TD` and the sum of `experts`."""

    x_TD: Tensor
    part_TD: Tensor | None = None
    experts: ExpertParts | None = None

    def normed(self, norm: Norm) -> tuple[Tensor, Tensor]:
        """The whole sum (T, D) and its norm (T, D)."""
        return add_norm(self.x_TD, norm.gain, norm.eps, part_TD=self.part_TD, experts=self.experts)

    def total(self) -> Tensor:
        """The whole sum (T, D)."""
        if self.part_TD is None and self.experts is None:
            return self.x_TD
        return add_norm(self.x_TD, None, 0.0, part_TD=self.part_TD, experts=self.experts)[0]


class KernelLayer(FusedLayer):
    """A layer in the form for CUDA; its numbers are those of `FusedLayer` except for rounding."""

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
        qkv = F.linear(inner_TD, self._qkv, self._qkv_bias)
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
        attended = attend.attend_stored(index, q_THC).flatten(1)
        out_TD = attended @ self._out
        if adapters is not None:
            out_TD.addmm_(*adapters.joint(index, "out", attended))
        if self._reduce is not None:
            out_TD = self._reduce(out_TD)
        x_TD, inner_TD = Stream(x_TD, out_TD).normed(self._output_norm)
        return self._mlp(x_TD, inner_TD, adapters, index, live_T)

    def _mlp(
        self, x_TD: Tensor, inner_TD: Tensor, adapters: TokenAdapters | None, index: int, live_T: Tensor | None
    ) -> Stream:
        """The stream with what the MLP of `inner_TD` adds to it; of a rank's part, summed over the ranks."""
        fuses = self._experts is not None and self._experts.fuses(len(inner_TD))
        shares = fuses and self._swiglu is not None and adapters is None  # adapters are of the shared experts alone
        part_TD = None if self._swiglu is None or shares else _swiglu(self._swiglu, inner_TD, adapters, index)
        experts: ExpertParts | None = None
        if self._experts is not None:
            if fuses:
                experts = self._experts.parts(inner_TD, live_T, shares=shares)
            else:
                routed = self._experts.routed(inner_TD, live_T)
                part_TD = routed if part_TD is None else part_TD.add_(routed)
        if self._reduce is not None:
            if experts is not None:
                part_TD = sum_experts(experts, x_TD.dtype, part_TD=part_TD)
            assert part_TD is not None
            part_TD, experts = self._reduce(part_TD), None
        return Stream(x_TD, part_TD, experts)


def _swiglu(mlp: FusedSwiGLU, x_TD: Tensor, adapters: TokenAdapters | None, layer: int) -> Tensor:
    gate_up = F.linear(x_TD, mlp.gate_up)
    if adapters is not None:
        gate_up.addmm_(*adapters.joint(layer, "gate_up", x_TD))
    inner_TF = gated(gate_up)
    part_TD = inner_TF @ mlp.down
    return part_TD if adapters is None else part_TD.addmm_(*adapters.joint(layer, "down", inner_TF))
