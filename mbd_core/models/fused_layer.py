"""A decoder layer with fewer, larger operations: the same numbers, and the same weights, joined in memory.

One product computes q, k and v, another gate and up. All heads share one norm and one rotation. A product adds the
residual itself. Cosines and sines come from a table. The modules' own parameters become slices of the joint weights,
so no weight is in memory twice.

Shape legend: T packed tokens, D hidden, H query heads, K key/value heads, N = H + K, C head channels, F MLP channels,
P positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.models.decoder import Decoder, DecoderLayer
from mbd_core.models.layer_parts import Attend, Reduce, RMSNorm
from mbd_core.models.lora import TokenAdapters
from mbd_core.models.mlp import MoE, SwiGLU
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.products import add_product, is_product, product_of
from mbd_core.models.rope import rotary


class FusedLayer:
    """A layer's attention and MLP, each with two matrix products, in torch's own operations."""

    def __init__(self, layer: DecoderLayer, model: Decoder) -> None:
        config, attention = model.config, layer.self_attn
        self._heads, self._head_dim = config.num_heads, config.head_dim
        self._rotating = config.num_heads + config.num_kv_heads
        self._reduce = model.reduce
        self._qkv = product_of(attention.q_proj, attention.k_proj, attention.v_proj)
        self._head_gains: tuple[Tensor, ...] = ()
        self._head_norm: Norm | None = None
        if attention.q_norm is not None and attention.k_norm is not None:
            self._head_gains = (
                attention.q_norm.weight.expand(config.num_heads, -1),
                attention.k_norm.weight.expand(config.num_kv_heads, -1),
            )
            self._head_norm = Norm(torch.cat(self._head_gains), config.rms_norm_eps)
        self._out = product_of(attention.o_proj)
        self._input_norm, self._output_norm = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        self._experts = layer.mlp if isinstance(layer.mlp, MoE) else None
        swiglu = layer.mlp.shared_experts if isinstance(layer.mlp, MoE) else layer.mlp
        self._swiglu = FusedSwiGLU(swiglu) if isinstance(swiglu, SwiGLU) else None

    def refresh(self) -> None:
        """Copies the heads' gains again, the only weights stored as copies."""
        if self._head_norm is not None:
            torch.cat(self._head_gains, out=self._head_norm.gain)

    def forward(
        self,
        x_TD: Tensor,
        rotation: "Rotation",
        attend: Attend,
        index: int,
        adapters: TokenAdapters | None,
        live_T: Tensor | None,
    ) -> Tensor:
        """The residual stream after this layer."""
        inner = self._input_norm(x_TD)
        qkv = self._qkv(inner)
        if adapters is not None:
            qkv.addmm_(*adapters.joint(index, "qkv", inner))
        qkv = qkv.view(len(qkv), -1, self._head_dim)
        qk, v = qkv[:, : self._rotating], qkv[:, self._rotating :]
        qk = rotation(qk if self._head_norm is None else self._head_norm(qk))
        q = rotation.scale(qk[:, : self._heads])
        attended = attend(index, q, qk[:, self._heads :], v).flatten(1)
        more = None if adapters is None else adapters.joint(index, "out", attended)
        x_TD = add_product(x_TD, attended, self._out, self._reduce, more)
        inner = self._output_norm(x_TD)
        if self._experts is None:
            assert self._swiglu is not None
            return self._swiglu.add(x_TD, inner, self._reduce, adapters, index)
        out = self._experts.routed(inner, live_T)
        if self._swiglu is not None:
            out = self._swiglu.add(out, inner, None, adapters, index)
        return x_TD + (out if self._reduce is None else self._reduce(out))


class FusedSwiGLU:
    """A SwiGLU with two matrix products."""

    def __init__(self, mlp: SwiGLU) -> None:
        self.gate_up = product_of(mlp.gate_proj, mlp.up_proj)
        self.down = product_of(mlp.down_proj)

    def add(
        self, to_TD: Tensor, x_TD: Tensor, reduce: Reduce | None, adapters: TokenAdapters | None, layer: int
    ) -> Tensor:
        """`to_TD` plus the MLP of `x_TD`."""
        gate_up = self.gate_up(x_TD)
        if adapters is not None:
            gate_up.addmm_(*adapters.joint(layer, "gate_up", x_TD))
        gate_TF, up_TF = gate_up.chunk(2, dim=-1)
        inner_TF = F.silu(gate_TF) * up_TF
        more = None if adapters is None else adapters.joint(layer, "down", inner_TF)
        return add_product(to_TD, inner_TF, self.down, reduce, more)


class Norm:
    """`RMSNorm` with gain (..., C) over the last dimension of (T, ..., C), by the fastest operations for the dtype.

    It rounds as `RMSNorm` does, bfloat16 before the gain; in float32 only the order of one sum differs.
    """

    def __init__(self, gain: Tensor, eps: float) -> None:
        self.gain, self.eps = gain.detach(), eps
        self._eps_1 = torch.tensor([eps], dtype=torch.float32, device=gain.device)
        self._on_cpu_float32 = gain.device.type == "cpu" and gain.dtype == torch.float32

    @classmethod
    def of(cls, norm: RMSNorm) -> "Norm":
        return cls(norm.weight, norm.eps)

    def __call__(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if self._on_cpu_float32:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x * torch.addcmul(self._eps_1, length, length, value=1 / size).rsqrt_()).mul_(self.gain)
        if x.dtype == torch.float64:
            return F.rms_norm(x.float(), (size,), None, self.eps).to(x.dtype).mul_(self.gain)
        return F.rms_norm(x, (size,), None, self.eps).mul_(self.gain)


@dataclass(frozen=True)
class Rotation:
    """The half-split rotation of heads (T, N, C) at T positions: `x cos + partner(x) sin`; the sines carry the signs.

    A channel's partner is `half` channels away. A channel that does not rotate is its own partner, with cosine 1 and
    sine 0. `partners_C` is `None` if all channels rotate. `in_one` uses one fused multiply-add instead of two
    operations. `query_scale_T11` multiplies queries; `None` leaves them.
    """

    cos_T1C: Tensor
    sin_T1C: Tensor
    half: int
    partners_C: Tensor | None
    in_one: bool
    query_scale_T11: Tensor | None = None

    def scale(self, q: Tensor) -> Tensor:
        """Rotated queries (T, H, C), scaled by their positions."""
        return q if self.query_scale_T11 is None else q * self.query_scale_T11

    def __call__(self, x: Tensor) -> Tensor:
        partner = x.roll(self.half, -1) if self.partners_C is None else x.index_select(-1, self.partners_C)
        if self.in_one:
            return torch.addcmul(x * self.cos_T1C, partner, self.sin_T1C)
        return (x * self.cos_T1C).add_(partner.mul_(self.sin_T1C))


class Rotations:
    """Cosines and sines (2, C) of every position, never reallocated because CUDA graphs read them at their address."""

    def __init__(self, config: ModelConfig, num_positions: int, like: Tensor) -> None:
        device, num_rotated, num_fixed = like.device, config.num_rotated, config.head_dim - config.num_rotated
        rope = rotary(torch.arange(num_positions, device=device), config)
        cos, sin = rope.cos[:, 0], rope.sin[:, 0]
        self._query_scale_P11 = None if rope.query_scale is None else rope.query_scale.to(like.dtype)
        first, second = sin.chunk(2, dim=-1)
        cos, sin = F.pad(cos, (0, num_fixed), value=1.0), F.pad(torch.cat((-first, second), dim=-1), (0, num_fixed))
        self.table_P2C = torch.stack((cos, sin), dim=1).to(like.dtype)
        self.num_rotated, self._half = num_rotated, num_rotated // 2
        channels = torch.arange(config.head_dim, device=device)
        partners = (channels + self._half) % num_rotated
        # a CPU's fused multiply and add is slow in bfloat16
        self._in_one = device.type != "cpu" or like.dtype == torch.float32
        self._partners_C = torch.where(channels < num_rotated, partners, channels) if num_fixed else None

    def at(self, positions_T: Tensor) -> Rotation:
        """The rotation at these positions."""
        cos_sin_T2C, scale_T11 = self.table_P2C.index_select(0, positions_T), self.query_scale_at(positions_T)
        cos_T1C, sin_T1C = cos_sin_T2C[:, :1], cos_sin_T2C[:, 1:]
        return Rotation(cos_T1C, sin_T1C, self._half, self._partners_C, self._in_one, scale_T11)

    def query_scale_at(self, positions_T: Tensor) -> Tensor | None:
        """The factors (T, 1, 1) of queries at these positions; `None` if queries are not scaled."""
        return None if self._query_scale_P11 is None else self._query_scale_P11.index_select(0, positions_T)


def fusible(layer: DecoderLayer) -> bool:
    """Whether the layer has a fused form: none of its products is in FP8."""
    attention, mlp = layer.self_attn, layer.mlp
    swiglu = mlp.shared_experts if isinstance(mlp, MoE) else mlp
    products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    if isinstance(swiglu, SwiGLU):
        products += [swiglu.gate_proj, swiglu.up_proj, swiglu.down_proj]
    return all(map(is_product, products))
