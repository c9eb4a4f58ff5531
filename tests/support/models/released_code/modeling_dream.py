"""Dream: Qwen2's layers without a mask; the logits at a position are of the next one's token."""

from .configuration_small import DreamConfig
from .layers_small import MLP, Attention, Layer
from .modeling_sdar import SDARForCausalLM


class DreamModel(SDARForCausalLM):
    config_class = DreamConfig

    def layer(self, config, number):
        head_dim = config.hidden_size // config.num_attention_heads
        attention = Attention(config, head_dim=head_dim, normed=False, biased=True)
        return Layer(config, attention, MLP(config.hidden_size, config.intermediate_size))
