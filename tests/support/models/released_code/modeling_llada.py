"""LLaDA: OLMo's names, full attention."""

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_small import LLaDAConfig
from .layers_small import RMSNorm, attend, heads, rotate


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, size = config, config.d_model
        keys = config.n_kv_heads * size // config.n_heads
        self.attn_norm = RMSNorm(size, config.rms_norm_eps)
        self.ff_norm = RMSNorm(size, config.rms_norm_eps)
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, keys, bias=False)
        self.v_proj = nn.Linear(size, keys, bias=False)
        self.attn_out = nn.Linear(size, size, bias=False)
        self.ff_proj = nn.Linear(size, config.mlp_hidden_size, bias=False)
        self.up_proj = nn.Linear(size, config.mlp_hidden_size, bias=False)
        self.ff_out = nn.Linear(config.mlp_hidden_size, size, bias=False)

    def forward(self, x, mask):
        normed, size, theta = self.attn_norm(x), self.config.d_model // self.config.n_heads, self.config.rope_theta
        q, k, v = (heads(p(normed), size) for p in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.attn_out(attend(rotate(q, theta), rotate(k, theta), v, mask))
        normed = self.ff_norm(x)
        return x + self.ff_out(nn.functional.silu(self.ff_proj(normed)) * self.up_proj(normed))


class LLaDAModelLM(PreTrainedModel):
    config_class = LLaDAConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Module()
        self.model.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.embedding_size, config.d_model),
                "blocks": nn.ModuleList(Block(config) for _ in range(config.n_layers)),
                "ln_f": RMSNorm(config.d_model, config.rms_norm_eps),
                "ff_out": nn.Linear(config.d_model, config.embedding_size, bias=False),
            }
        )
        self.post_init()

    def forward(self, input_ids, attention_mask):
        parts = self.model.transformer
        x = parts["wte"](input_ids)
        for block in parts["blocks"]:
            x = block(x, attention_mask)
        return CausalLMOutput(logits=parts["ff_out"](parts["ln_f"](x)))
