"""LLaDA2-MoE: one projection for q, k and v, a partial rotation, experts chosen within the best groups."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_small import LLaDA2MoeConfig
from .layers_small import MLP, RMSNorm, attend, heads, mixture, rotate


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, size = config, config.head_dim
        self.widths = [config.num_attention_heads * size] + 2 * [config.num_key_value_heads * size]
        self.query_key_value = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.query_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.dense = nn.Linear(self.widths[0], config.hidden_size, bias=False)

    def forward(self, x, mask):
        q, k, v = (heads(part, self.config.head_dim) for part in self.query_key_value(x).split(self.widths, -1))
        theta, rotated = self.config.rope_theta, int(self.config.head_dim * self.config.partial_rotary_factor)
        q, k = rotate(self.query_layernorm(q), theta, rotated), rotate(self.key_layernorm(k), theta, rotated)
        return self.dense(attend(q, k, v, mask))


class Gate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x):
        config = self.config
        scores = (x.float() @ self.weight.float().T).sigmoid()
        groups = (scores + self.expert_bias).unflatten(-1, (config.n_group, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(config.topk_group, -1).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        chosen = choice.topk(config.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = nn.ModuleList(MLP(config.hidden_size, width) for _ in range(config.num_experts))
        self.shared_experts = MLP(config.hidden_size, width * config.num_shared_experts)

    def forward(self, x):
        chosen, weights = self.gate(x)
        return mixture(x, self.experts, chosen, weights.to(x.dtype)) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = number < config.first_k_dense_replace
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else Experts(config)

    def forward(self, x, mask):
        x = x + self.attention(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LLaDA2MoeModelLM(PreTrainedModel):
    config_class = LLaDA2MoeConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask):
        x = self.model.word_embeddings(input_ids)
        for layer in self.model.layers:
            x = layer(x, attention_mask)
        return CausalLMOutput(logits=self.lm_head(self.model.norm(x)))
