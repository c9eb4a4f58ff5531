"""A small model of every family, with random weights."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig, MoEConfig
from mbd_core.models.rope_scaling import YarnScaling

SIZES = {
    "architecture": "SDARForCausalLM",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "max_positions": 64,
    "tie_word_embeddings": False,
    "mask_token_id": 0,
    "eos_token_ids": (1,),
    "block_size": 4,
}
SDAR = ModelConfig(**(SIZES | {"num_heads": 4, "num_kv_heads": 2}))
WHOLE_SEQUENCE = {"qk_norm": False, "attention": "full", "block_size": 32}
FAMILIES = {
    "sdar": SDAR,
    "sdar-moe": replace(
        SDAR,
        architecture="SDARMoeForCausalLM",
        num_layers=4,
        moe=MoEConfig(
            num_experts=4,
            experts_per_token=2,
            intermediate_size=6,
            score="softmax",
            norm_topk_prob=True,
            sparse_step=2,
            dense_layers=(3,),
        ),
    ),
    "llada2": replace(
        SDAR,
        architecture="LLaDA2MoeModelLM",
        block_size=32,
        rotary_dim=4,
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=2,
            intermediate_size=6,
            score="sigmoid",
            norm_topk_prob=True,
            num_shared_experts=2,
            expert_bias=True,
            num_groups=4,
            topk_groups=2,
            routed_scaling=2.5,
            first_dense_layers=1,
        ),
    ),
    "fastdllm2": replace(
        SDAR,
        architecture="Fast_dLLM_QwenForCausalLM",
        head_dim=4,
        qkv_bias=True,
        shift_logits=True,
        qk_norm=False,
    ),
    "nemotron": replace(
        SDAR,
        architecture="NemotronLabsDiffusionModel",
        qk_norm=False,
        rope_scaling=YarnScaling(
            factor=8.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
        attention="causal",
    ),
    "llada": replace(SDAR, architecture="LLaDAModelLM", num_heads=2, num_kv_heads=2, **WHOLE_SEQUENCE),
    "dream": replace(SDAR, architecture="DreamModel", head_dim=4, qkv_bias=True, shift_logits=True, **WHOLE_SEQUENCE),
}


def random_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """Every number is random, also gains, biases and routing offsets, so that a lost tensor cannot go unnoticed."""
    model = Decoder(config)
    init_weights(model, seed=seed, std=0.2)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1:
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return model


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
