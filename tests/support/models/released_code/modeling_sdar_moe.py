"""SDAR-MoE: Qwen3-MoE's layers under the mask that the caller gives."""

import torch
from torch import nn

from .configuration_small import SDARMoeConfig
from .layers_small import MLP, Attention, Layer, mixture
from .modeling_sdar import SDARForCausalLM


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            MLP(config.hidden_size, config.moe_intermediate_size) for _ in range(config.num_experts)
        )

    def forward(self, x):
        weights, chosen = torch.topk(self.gate(x).softmax(-1), self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return mixture(x, self.experts, chosen, weights)


class SDARMoeForCausalLM(SDARForCausalLM):
    config_class = SDARMoeConfig

    def layer(self, config, number):
        sparse = number not in config.mlp_only_layers and (number + 1) % config.decoder_sparse_step == 0
        attention = Attention(config, head_dim=config.head_dim, normed=True, biased=False)
        mlp = Experts(config) if sparse else MLP(config.hidden_size, config.intermediate_size)
        return Layer(config, attention, mlp)
