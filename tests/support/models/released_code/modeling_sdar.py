"""SDAR: Qwen3's layers under the mask that the caller gives."""

from typing import ClassVar

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_small import SDARConfig
from .layers_small import MLP, Attention, Layer, Stack


class SDARForCausalLM(PreTrainedModel):
    config_class = SDARConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Stack(config, [self.layer(config, number) for number in range(config.num_hidden_layers)])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def layer(self, config, number):
        attention = Attention(config, head_dim=config.head_dim, normed=True, biased=False)
        return Layer(config, attention, MLP(config.hidden_size, config.intermediate_size))

    def forward(self, input_ids, attention_mask):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, attention_mask)))
