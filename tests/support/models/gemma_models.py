"""A small DiffusionGemma with random weights."""

from dataclasses import replace

from family_models import random_model

from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import NO_MASK, GemmaLayers, ModelConfig, MoEConfig

GEMMA = ModelConfig(
    architecture="DiffusionGemmaForBlockDiffusion",
    vocab_size=48,
    hidden_size=32,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_positions=256,
    tie_word_embeddings=True,
    mask_token_id=NO_MASK,
    eos_token_ids=(1,),
    block_size=8,
    attention="causal",
    moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=8, score="softmax", norm_topk_prob=True),
    gemma=GemmaLayers(
        window=6,
        global_layers=(2,),
        global_kv_heads=2,
        global_head_dim=16,
        global_rope_theta=1e6,
        global_rotated=0.25,
        softcap=30.0,
    ),
)


def gemma(seed: int = 0, **changes: object) -> Decoder:
    return random_model(replace(GEMMA, **changes), seed=seed).eval()
