"""What the families' code in this folder shares: norm, rotation, attention, SwiGLU, experts. Nothing of the project.

Shape legend: B sequences, L positions, H heads, C head channels, D hidden, E experts.
"""

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, theta, rotated=None):
    """Positions 0, 1, ... of x (B, H, L, C); the first `rotated` channels turn, in halves."""
    rotated = rotated or x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, rotated, 2).float() / rotated)
    angle = torch.outer(torch.arange(x.shape[-2]).float(), inverse)
    first, second, rest = x[..., : rotated // 2], x[..., rotated // 2 : rotated], x[..., rotated:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def heads(x, size):
    """(B, L, H * C) as (B, H, L, C)."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def attend(q, k, v, mask):
    """Softmax attention of grouped heads; `mask` (L, L) is true where a query may look."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(-2)


class MLP(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def mixture(x, experts, chosen, weights):
    """The weighted sum of each token's experts; `chosen` and `weights` are (B, L, experts a token)."""
    outputs = torch.stack([expert(x) for expert in experts], dim=-2)
    picked = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
    return (picked * weights[..., None]).sum(-2)


class Attention(nn.Module):
    """Qwen's names. `normed`: norms of q and k; `biased`: biases of q, k and v."""

    def __init__(self, config, *, head_dim, normed, biased):
        super().__init__()
        self.config, self.head_dim = config, head_dim
        width = config.num_key_value_heads * head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * head_dim, bias=biased)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=biased)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=biased)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def forward(self, x, mask):
        q, k, v = (heads(p(x), self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        theta = self.config.rope_theta
        return self.o_proj(attend(rotate(self.q_norm(q), theta), rotate(self.k_norm(k), theta), v, mask))


class Layer(nn.Module):
    def __init__(self, config, attention, mlp):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x, mask):
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    def __init__(self, config, layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, mask):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)
