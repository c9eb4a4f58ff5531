"""Small model folders with known weights, and their bytes."""

from dataclasses import replace
from pathlib import Path

import torch

from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig, MoEConfig

LLADA2 = ModelConfig(
    architecture="LLaDA2MoeModelLM",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=6e5,
    rms_norm_eps=1e-6,
    max_positions=64,
    tie_word_embeddings=False,
    mask_token_id=0,
    eos_token_ids=(1,),
    block_size=32,
    rotary_dim=4,
    moe=MoEConfig(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=6,
        score="sigmoid",
        norm_topk_prob=True,
        num_shared_experts=1,
        expert_bias=True,
        num_groups=4,
        topk_groups=2,
        first_dense_layers=1,
    ),
)
SDAR_MOE = replace(
    LLADA2,
    architecture="SDARMoeForCausalLM",
    rotary_dim=None,
    moe=MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=6, score="softmax", norm_topk_prob=True),
)
SDAR = replace(LLADA2, architecture="SDARForCausalLM", rotary_dim=None, moe=None, tie_word_embeddings=True)
CONFIGS = {"llada2": LLADA2, "sdar-moe": SDAR_MOE, "sdar": SDAR}


def write_model(folder: Path, config: ModelConfig, **options) -> Path:
    model = Decoder(config)
    init_weights(model, seed=0)
    for name, tensor in model.state_dict().items():
        if name.endswith("expert_bias"):
            tensor.copy_(torch.arange(8) * 1.001)
    save_model(folder, model, dtype=torch.bfloat16, extra={"notes.txt": "beside the weights"}, **options)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
