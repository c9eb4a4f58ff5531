"""Floating-point operations of a forward, counted from the model's shapes: two for each multiply-add.

Matrices, router and attention are counted. Norms, rotations and other elementwise work are not, and neither is the
attention of layers with a window, which does not grow with the depth.
"""

from mbd_core.models.model_config import ModelConfig


def matrix_flops(config: ModelConfig) -> float:
    """Operations of one token in the layers' matrices; of a mixture's experts only the activated ones count."""
    total = 0.0
    for layer in range(config.num_layers):
        c = config.of_layer(layer)
        total += 2.0 * c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) + mlp_flops(config, layer)
    return total


def mlp_flops(config: ModelConfig, layer: int) -> float:
    """Operations of one token in the MLP of layer number `layer`.

    With experts these are the router and the chosen experts, and in Gemma the dense MLP too.
    """
    moe = config.moe if config.is_sparse(layer) else None
    dense = 6.0 * config.hidden_size * config.intermediate_size
    if moe is None:
        return dense
    width = moe.experts_per_token * moe.intermediate_size + moe.shared_size
    return 2.0 * config.hidden_size * (moe.num_experts + 3 * width) + (0.0 if config.gemma is None else dense)


def pair_flops(config: ModelConfig) -> float:
    """Operations of one query with one key in all layers without a window: the score, and the sum over values."""
    layers = [config.of_layer(n) for n in range(config.num_layers) if config.window_of(n) is None]
    return 4.0 * sum(c.num_heads * c.head_dim for c in layers)


def head_flops(config: ModelConfig) -> float:
    """Operations of one position's logits."""
    return 2.0 * config.hidden_size * config.vocab_size
