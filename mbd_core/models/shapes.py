"""Model shapes by name, for benchmarks with random weights: the papers' models at real size, and small ones of ours.

Sizes follow the published configurations, with three exceptions. `sdar-50m` is SDAR's layout at 50 million parameters,
for a CPU. `sdar-null` is so small that a step measures the engine's own work. Each `tiny-*` shape is a family's layout
at a few hundred thousand parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mbd_core.models.model_config import NO_MASK, GemmaLayers, ModelConfig, MoEConfig
from mbd_core.models.rope_scaling import YarnScaling

if TYPE_CHECKING:
    import torch

    from mbd_core.models.decoder import Decoder

SDAR_8B = ModelConfig(
    architecture="SDARForCausalLM",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    max_positions=32768,
    tie_word_embeddings=False,
    mask_token_id=151669,
    eos_token_ids=(151645, 151643),
    block_size=32,
)
SDAR_50M = replace(
    SDAR_8B,
    vocab_size=12288,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=12,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    mask_token_id=12287,
    eos_token_ids=(12286,),
)
LLADA2_MINI = ModelConfig(
    architecture="LLaDA2MoeModelLM",
    vocab_size=157184,
    hidden_size=2048,
    intermediate_size=5120,
    num_layers=20,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    rope_theta=600_000.0,
    rms_norm_eps=1e-6,
    max_positions=16384,
    tie_word_embeddings=False,
    mask_token_id=156895,
    eos_token_ids=(156892,),
    block_size=32,
    rotary_dim=64,
    moe=MoEConfig(
        num_experts=256,
        experts_per_token=8,
        intermediate_size=512,
        score="sigmoid",
        norm_topk_prob=True,
        num_shared_experts=1,
        expert_bias=True,
        num_groups=8,
        topk_groups=4,
        routed_scaling=2.5,
        first_dense_layers=1,
    ),
)
assert LLADA2_MINI.moe is not None
LLADA2_FLASH = replace(
    LLADA2_MINI,
    hidden_size=4096,
    intermediate_size=9216,
    num_layers=32,
    num_heads=32,
    moe=replace(LLADA2_MINI.moe, intermediate_size=1024),
)
LLADA22: dict[str, Any] = {  # LLaDA2.2's changes
    "rope_theta": 3e6,
    "max_positions": 131072,
    "eos_token_ids": (156892, 156900),
    "delete_token_id": 156930,
    "split_token_id": 156931,
}
LLADA22_MINI = replace(LLADA2_MINI, **LLADA22, moe=replace(LLADA2_MINI.moe, expert_capacity=48))
assert LLADA2_FLASH.moe is not None
LLADA22_FLASH = replace(LLADA2_FLASH, **LLADA22, moe=replace(LLADA2_FLASH.moe, expert_capacity=48))
LLADA_8B = ModelConfig(
    architecture="LLaDAModelLM",
    vocab_size=126464,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    max_positions=4096,
    tie_word_embeddings=False,
    mask_token_id=126336,
    eos_token_ids=(126081,),
    block_size=32,
    qk_norm=False,
    attention="full",
)
DREAM_7B = ModelConfig(
    architecture="DreamModel",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    max_positions=131072,
    tie_word_embeddings=False,
    mask_token_id=151666,
    eos_token_ids=(151643,),
    block_size=32,
    qk_norm=False,
    qkv_bias=True,
    shift_logits=True,
    attention="full",
)
FAST_DLLM_V2_7B = replace(
    DREAM_7B,
    architecture="Fast_dLLM_QwenForCausalLM",
    max_positions=32768,
    mask_token_id=151665,
    eos_token_ids=(151645,),
    attention="block_causal",
)
NEMOTRON_8B = ModelConfig(
    architecture="NemotronLabsDiffusionModel",
    vocab_size=131072,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=34,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-5,
    max_positions=262144,
    tie_word_embeddings=False,
    mask_token_id=100,
    eos_token_ids=(11,),
    block_size=32,
    qk_norm=False,
    rope_scaling=YarnScaling(
        factor=16.0,
        original_max_position_embeddings=16384,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    ),
    attention="causal",
)

# Autoregressive models, the origins of block-diffusion models.
AUTOREGRESSIVE: dict[str, Any] = {"mask_token_id": NO_MASK, "block_size": 1, "attention": "causal"}
QWEN3_8B = replace(
    SDAR_8B, architecture="Qwen3ForCausalLM", max_positions=40960, eos_token_ids=(151645,), **AUTOREGRESSIVE
)
QWEN3_06B = replace(
    QWEN3_8B,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    tie_word_embeddings=True,
)
QWEN2_7B = replace(
    FAST_DLLM_V2_7B, architecture="Qwen2ForCausalLM", shift_logits=False, eos_token_ids=(151645,), **AUTOREGRESSIVE
)
SMOLLM2_135M = replace(
    QWEN3_8B,
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=1e5,
    rms_norm_eps=1e-5,
    max_positions=8192,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
    qk_norm=False,
)
MISTRAL_7B = replace(
    SMOLLM2_135M,
    architecture="MistralForCausalLM",
    vocab_size=32768,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    max_positions=32768,
    tie_word_embeddings=False,
)
QWEN3_30B_A3B = replace(
    QWEN3_8B,
    architecture="Qwen3MoeForCausalLM",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    moe=MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=768, score="softmax", norm_topk_prob=True),
)

# dllm's adaptation of autoregressive models. The mask is an id of their tokenizers.
A2D: dict[str, Any] = {"mask_token_id": 16, "block_size": 32, "attention": "block_causal"}

DIFFUSION_GEMMA = ModelConfig(
    architecture="DiffusionGemmaForBlockDiffusion",
    vocab_size=262144,
    hidden_size=2816,
    intermediate_size=2112,
    num_layers=30,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_positions=262144,
    tie_word_embeddings=True,
    mask_token_id=NO_MASK,
    eos_token_ids=(1, 106, 50),
    block_size=256,
    attention="causal",
    moe=MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=704, score="softmax", norm_topk_prob=True),
    gemma=GemmaLayers(
        window=1024,
        global_layers=(5, 11, 17, 23, 29),
        global_kv_heads=2,
        global_head_dim=512,
        global_rope_theta=1e6,
        global_rotated=0.25,
        softcap=30.0,
    ),
)


def _tiny(config: ModelConfig, *, num_kv_heads: int = 2) -> ModelConfig:
    """The same family at a few hundred thousand parameters, the size of the parity fixtures."""
    moe, gemma = config.moe, config.gemma
    if gemma is not None:
        gemma = replace(gemma, window=24, global_layers=(2,), global_kv_heads=2, global_head_dim=32)
    if moe is not None:
        capacity = min(moe.expert_capacity, 6)
        moe = replace(moe, num_experts=16, experts_per_token=4, intermediate_size=32, expert_capacity=capacity)
        has_groups = gemma is None and moe.num_groups > 1
        moe = replace(moe, num_groups=4, topk_groups=2) if has_groups else moe
    return replace(
        config,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        rotary_dim=None if config.rotary_dim is None else 8,
        max_positions=512,
        mask_token_id=250 if config.has_mask else NO_MASK,
        eos_token_ids=(251,),
        delete_token_id=None if config.delete_token_id is None else 252,
        split_token_id=None if config.split_token_id is None else 253,
        moe=moe,
        block_size=config.block_size if gemma is None else 16,
        gemma=gemma,
    )


SHAPES: dict[str, ModelConfig] = {
    "sdar-null": replace(
        SDAR_50M,
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        mask_token_id=63,
        eos_token_ids=(62,),
    ),
    "sdar-50m": SDAR_50M,
    # SDAR-1.7B and 4B are Qwen3-1.7B and 4B with a mask token, tied embeddings included
    "sdar-1.7b": replace(
        SDAR_8B, hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, tie_word_embeddings=True
    ),
    "sdar-4b": replace(SDAR_8B, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "sdar-8b": SDAR_8B,
    "llada2-mini": LLADA2_MINI,
    "llada2-flash": LLADA2_FLASH,
    "llada2.2-mini": LLADA22_MINI,
    "llada2.2-flash": LLADA22_FLASH,
    "llada-8b": LLADA_8B,
    "dream-7b": DREAM_7B,
    "fast-dllm-v2-1.5b": replace(
        FAST_DLLM_V2_7B,
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_heads=12,
        num_kv_heads=2,
        tie_word_embeddings=True,
    ),
    "fast-dllm-v2-7b": FAST_DLLM_V2_7B,
    "nemotron-3b": replace(NEMOTRON_8B, hidden_size=3072, intermediate_size=9216, num_layers=26),
    "nemotron-8b": NEMOTRON_8B,
    "nemotron-14b": replace(NEMOTRON_8B, hidden_size=5120, intermediate_size=16384, num_layers=40, rope_theta=1e9),
    "diffusion-gemma": DIFFUSION_GEMMA,
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen2.5-7b": QWEN2_7B,
    "smollm2-135m": SMOLLM2_135M,
    "mistral-7b": MISTRAL_7B,
    "tiny-sdar": _tiny(SDAR_8B),
    "tiny-llada2": _tiny(LLADA2_MINI),
    "tiny-llada2.2": _tiny(LLADA22_MINI),
    "tiny-llada": _tiny(LLADA_8B, num_kv_heads=4),
    "tiny-dream": _tiny(DREAM_7B),
    "tiny-fast-dllm-v2": _tiny(FAST_DLLM_V2_7B),
    "tiny-diffusion-gemma": _tiny(DIFFUSION_GEMMA),
    "tiny-nemotron": _tiny(NEMOTRON_8B),
    "tiny-qwen3": _tiny(QWEN3_8B),
    "tiny-qwen3-moe": _tiny(QWEN3_30B_A3B),
    "tiny-qwen2": _tiny(QWEN2_7B),
    "tiny-llama": _tiny(SMOLLM2_135M),
    "tiny-mistral": _tiny(MISTRAL_7B),
    "tiny-a2d-llama": _tiny(replace(SMOLLM2_135M, architecture="A2DLlamaLMHeadModel", **A2D)),
    "tiny-a2d-qwen2": _tiny(replace(QWEN2_7B, architecture="A2DQwen2LMHeadModel", **A2D)),
    "tiny-a2d-qwen3": _tiny(replace(QWEN3_8B, architecture="A2DQwen3LMHeadModel", **A2D)),
}


def random_model(
    config: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0, std: float = 0.02
) -> Decoder:
    """A model of this shape with random weights, allocated once: on `device`, in `dtype`."""
    import torch

    from mbd_core.models.decoder import Decoder, init_weights

    with torch.device("meta"):
        model = Decoder(config).to(dtype)
    model = model.to_empty(device=device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    init_weights(model, seed=seed, std=std)
    return model.eval().requires_grad_(False)
