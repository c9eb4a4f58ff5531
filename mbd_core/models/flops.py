"""Floating-point operations of a forward, counted from the model's shapes: two for each multiply-add.

Counted are the matrices, the router and the attention; not norms, rotations and other work by element.
"""

from mbd_core.models.model_config import ModelConfig


def matrix_flops(config: ModelConfig) -> float:
    """Operations of one token in the layers' matrices: of a mixture of experts those that it activates."""
    attention = 2.0 * config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    return sum(attention + mlp_flops(config, layer) for layer in range(config.num_layers))


def mlp_flops(config: ModelConfig, layer: int) -> float:
    """Operations of one token in the MLP of layer number `layer`: with experts the router and those it chooses."""
    moe = config.moe if config.is_sparse(layer) else None
    if moe is None:
        return 6.0 * config.hidden_size * config.intermediate_size
    width = moe.experts_per_token * moe.intermediate_size + moe.shared_size
    return 2.0 * config.hidden_size * (moe.num_experts + 3 * width)


def pair_flops(config: ModelConfig) -> float:
    """Operations of one query with one key in all layers: the score, and the sum over values."""
    return 4.0 * config.num_layers * config.num_heads * config.head_dim


def head_flops(config: ModelConfig) -> float:
    """Operations of one position's logits."""
    return 2.0 * config.hidden_size * config.vocab_size
