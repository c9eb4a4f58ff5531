"""The decoder stack: pre-norm, GQA with QK-norm and RoPE, SwiGLU (SDAR's layout, which is Qwen3's).

The stack knows no mask, no cache and no decoding method: attention is a callable handed to `forward`. Module names are
the checkpoint's tensor names, so `state_dict()` *is* the Hugging Face layout.

Shape legend: ... any leading shape (`B L` in training, `T` packed in the engine), D hidden, H query heads, K key/value
heads, C head channels, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mbd_core.models.config import ModelConfig


class Attend(Protocol):
    """Attention of one layer: queries (..., H, C), keys and values (..., K, C) -> (..., H, C), scaled by C^-1/2."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and cast back before the gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines (..., 1, C) of the half-split rotation at `positions` (...), in float32."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * config.rope_theta ** (-half / config.head_dim)
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of `x` (..., heads, C)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        d, c = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(d, config.num_heads * c, bias=False)
        self.k_proj = nn.Linear(d, config.num_kv_heads * c, bias=False)
        self.v_proj = nn.Linear(d, config.num_kv_heads * c, bias=False)
        self.o_proj = nn.Linear(config.num_heads * c, d, bias=False)
        self.q_norm = RMSNorm(c, config.rms_norm_eps)
        self.k_norm = RMSNorm(c, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        return self.o_proj(attend(layer, q, k, v).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, layer: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A diffusion language model: token ids and positions in, hidden states out, logits where they are asked for."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states (..., D) of `input_ids` (...) at `positions` (...)."""
        x = self.model.embed_tokens(input_ids)
        cos, sin = rotary(positions, self.config)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, attend, index)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits (..., V) of hidden states (..., D); logits at a position predict that position's token."""
        return self.lm_head(hidden).float()


def init_weights(model: Decoder, *, seed: int, std: float = 0.02) -> None:
    """Draw fresh weights: normal with `std`, output projections scaled down by depth, norms at one."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * model.config.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            scale = depth if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.normal_(0.0, std * scale, generator=generator)
