"""DiffusionGemma's layers: norms around each part, a dense MLP beside experts, two kinds of heads, self-conditioning.

One set of weights computes two kinds of tokens. Known tokens, of the prompt and of finished text, have plain
embeddings, and `context_scalar` scales their stream after each layer. The embeddings of denoised tokens (`Denoising`)
are combined with the last forward's expectation at their places, and `layer_scalar` scales their stream. Modules have
the release's names; `checkpoint.families` has the three names that differ.

Shape legend: ... any leading shape, D hidden, H query heads, K key/value heads, C head channels, T tokens, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mbd_core.models.layer_parts import Attend, Reduce, RMSNorm, join, pieces, together
from mbd_core.models.lora import TokenAdapters
from mbd_core.models.mlp import Experts, Router, SwiGLU, experts_kernel
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.rope import Rope
from mbd_core.ops.experts.choice import grouped_experts, loop_experts


@dataclass(frozen=True)
class Denoising:
    """The tokens (...) of a forward that are denoised, bool, and their expected embeddings (..., D).

    `Decoder.expected_embedding` makes `expected` from the last forward's logits at the same places. It is zero where
    there was no such forward, and is read only at denoised tokens.
    """

    at: Tensor
    expected: Tensor

    def pieces(self, split: Sequence[int] | None) -> "list[Denoising]":
        """One `Denoising` for each row of the lengths `split`; `None`: all tokens are one row."""
        return [Denoising(*row) for row in zip(pieces(self.at, split), pieces(self.expected, split), strict=True)]


def gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, which the release was trained with."""
    return F.gelu(x, approximate="tanh")


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """`x` (..., D) in float32, divided by its root mean square."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class GemmaNorm(RMSNorm):
    """Root-mean-square norm whose gain is applied in float32 too."""

    def forward(self, x: Tensor) -> Tensor:
        return (unit_rms(x, self.eps) * self.weight.float()).to(x.dtype)


class GemmaAttention(nn.Module):
    """The attention of one layer. `config` has this layer's heads (`ModelConfig.of_layer`)."""

    def __init__(self, config: ModelConfig, *, has_values: bool) -> None:
        super().__init__()
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        d, c, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.q_proj = nn.Linear(d, config.num_heads * c, bias=False)
        self.k_proj = nn.Linear(d, config.num_kv_heads * c, bias=False)
        self.v_proj = nn.Linear(d, config.num_kv_heads * c, bias=False) if has_values else None
        self.o_proj = nn.Linear(config.num_heads * c, d, bias=False)
        self.q_norm, self.k_norm = GemmaNorm(c, eps), GemmaNorm(c, eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (..., H, C), keys and values (..., K, C) of `x` (..., D), normed and not yet rotated."""
        projections = [p for p in (self.q_proj, self.k_proj, self.v_proj) if p is not None]
        q, k, *own_v = (out.unflatten(-1, (-1, self.head_dim)) for out in together(projections, x))
        v = own_v[0] if own_v else k
        return self.q_norm(q), self.k_norm(k), unit_rms(v, self.eps).to(v.dtype)


class GeGLU(SwiGLU):
    """`down(gelu(gate x) * up x)` on (..., D)."""

    @staticmethod
    def act(gate: Tensor) -> Tensor:
        return gelu(gate)


class GemmaRouter(Router):
    """Chooses experts by the normed and scaled residual stream; each expert's weight has a learned factor."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.moe is not None
        super().__init__(config.hidden_size, config.moe)
        self.eps = config.rms_norm_eps
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.moe.num_experts))

    def forward(
        self, x_TD: Tensor, live_T: Tensor | None = None, num_shared: int = 0, given_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = super().forward(self.scaled(x_TD), given_TK=given_TK)
        return ids_TK, weights_TK * self.per_expert_scale.float()[ids_TK]

    def scaled(self, x_TD: Tensor) -> Tensor:
        """The router matrix's input."""
        return unit_rms(x_TD, self.eps).to(x_TD.dtype) * self.scale * x_TD.shape[-1] ** -0.5


class GemmaExperts(Experts):
    """Stacked experts, each a GeGLU. The Triton kernels compute SwiGLU, so they are not used here."""

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        _, width, hidden = gate.shape
        kernel = experts_kernel(gate.device, gate.dtype, width, hidden, differentiable=False, gelu=True)
        product = grouped_experts if kernel.name == "grouped" else loop_experts
        return product(x_TD, gate, up, down, ids_TK, weights_TK, act=gelu)


class GemmaLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.gemma is not None and config.moe is not None
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaNorm(d, eps)
        has_values = layer not in config.gemma.global_layers
        self.self_attn = GemmaAttention(config.of_layer(layer), has_values=has_values)
        self.post_attention_layernorm = GemmaNorm(d, eps)
        self.pre_feedforward_layernorm = GemmaNorm(d, eps)
        self.mlp = GeGLU(d, config.intermediate_size)
        self.post_feedforward_layernorm_1 = GemmaNorm(d, eps)
        self.router = GemmaRouter(config)
        self.pre_feedforward_layernorm_2 = GemmaNorm(d, eps)
        self.experts = GemmaExperts(d, config.moe)
        self.post_feedforward_layernorm_2 = GemmaNorm(d, eps)
        self.post_feedforward_layernorm = GemmaNorm(d, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.context_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self,
        rows: list[Tensor],
        rope: Rope,
        attend: Attend,
        layer: int,
        split: Sequence[int] | None,
        reduce: Reduce | None,
        adapters: TokenAdapters | None = None,
        kept: Tensor | None = None,
        denoising: Sequence[Denoising] | None = None,
    ) -> list[Tensor]:
        """The residual stream after this layer, in the same rows. Only the rotation and `attend` get all rows in one
        tensor.

        This model does not scale scores. `attend` divides scores by C^1/2, so queries are multiplied by C^1/2 here.
        """
        assert adapters is None and kept is None, "Gemma is neither adapted nor trained here"
        parts = [self.self_attn.project(self.input_layernorm(x)) for x in rows]
        q, k, v = (join(part) for part in zip(*parts, strict=True))
        q = rope.rotate(q) * self.self_attn.head_dim**0.5
        attended = pieces(attend(layer, q, rope.rotate(k), v), split)
        scalars = [self._scalar(None if denoising is None else denoising[i].at) for i in range(len(rows))]
        return [self._finish(x, out, reduce) * scalar for x, out, scalar in zip(rows, attended, scalars, strict=True)]

    def _scalar(self, denoised: Tensor | None) -> Tensor:
        """The factor of each token's stream."""
        if denoised is None:
            return self.context_scalar
        return torch.where(denoised[..., None], self.layer_scalar, self.context_scalar)

    def _finish(self, x: Tensor, attended: Tensor, reduce: Reduce | None) -> Tensor:
        out = self.self_attn.o_proj(attended.flatten(-2))
        x = x + self.post_attention_layernorm(out if reduce is None else reduce(out))
        dense = self.mlp(self.pre_feedforward_layernorm(x))
        x_TD = x.flatten(0, -2)
        sparse = self.experts(self.pre_feedforward_layernorm_2(x_TD), *self.router(x_TD)).view_as(x)
        if reduce is not None:
            dense, sparse = reduce(dense), reduce(sparse)
        both = self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(sparse)
        return x + self.post_feedforward_layernorm(both)


class SelfConditioning(nn.Module):
    """The embeddings of denoised tokens: `rms(x + glu(rms(expected)))`, the outer norm without a gain."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre_norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GeGLU(config.hidden_size, config.intermediate_size)
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor, denoising: Denoising, reduce: Reduce | None) -> Tensor:
        """Embeddings (..., D); denoised tokens' embeddings are conditioned."""
        glu = self.mlp(self.pre_norm(denoising.expected))
        conditioned = unit_rms(x + (glu if reduce is None else reduce(glu)), self.eps)
        return torch.where(denoising.at[..., None], conditioned.to(x.dtype), x)
