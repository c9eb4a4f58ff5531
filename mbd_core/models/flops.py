"""Floating-point operations of a forward, counted from the model's shapes: two for each multiply-add.

Counted are the matrices, the router and the attention; not norms, rotations and other work by element.
"""

from mbd_core.models.model_config import ModelConfig


def matrix_flops(config: ModelConfig) -> float:
    """Operations of one token in the layers' matrices: of a mixture of experts those that it activates."""
    d, c = config.hidden_size, config.head_dim
    attention = d * c * (2 * config.num_heads + 2 * config.num_kv_heads)
    total = 0.0
    for layer in range(config.num_layers):
        moe = config.moe if config.is_sparse(layer) else None
        if moe is None:
            mlp = 3 * d * config.intermediate_size
        else:
            experts = 3 * d * (moe.experts_per_token * moe.intermediate_size + moe.shared_size)
            mlp = d * moe.num_experts + experts
        total += 2 * (attention + mlp)
    return total


def pair_flops(config: ModelConfig) -> float:
    """Operations of one query with one key in all layers: the score, and the sum over values."""
    return 4.0 * config.num_layers * config.num_heads * config.head_dim


def head_flops(config: ModelConfig) -> float:
    """Operations of one position's logits."""
    return 2.0 * config.hidden_size * config.vocab_size
