"""Released checkpoints: their config.json is taken, and their tensors are those that a folder must hold.

Values are the published configurations'; what a release leaves to its tokenizer or its code is left out here too.
Models are made at full size on the meta device, without memory.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mbd_core.checkpoint.config import read_config, write_config
from mbd_core.checkpoint.model_family import ExpertLayout
from mbd_core.checkpoint.tensors import stored_tensors
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import DIFFUSION_GEMMA, SHAPES

WRITTEN = {  # by transformers, into all of them
    "auto_map": {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"},
    "transformers_version": "4.52.3",
    "initializer_range": 0.02,
    "_name_or_path": "somewhere/else",
    "_attn_implementation_autoset": True,
    "attn_implementation": "flex_attention",
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "torchscript": False,
    "pruned_heads": {},
    "prefix": None,
    "output_attentions": False,
    "is_encoder_decoder": False,
    "pretraining_tp": 1,
    "expert_capacity": None,
    "temperature": 1.0,
    "do_sample": False,
    "max_length": 20,
    "attention_dropout": 0.0,
    "debug": False,
}
LLADA2_MINI = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "vocab_size": 157184,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "first_k_dense_replace": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "output_router_logits": False,
    "initializer_range": 0.02,
    "using_split_qkv_in_self_attention": False,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 64,
    "rope_theta": 600000,
    "rope_scaling": None,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-06,
    "use_rmsnorm": True,
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "tie_word_embeddings": False,
    "norm_head": False,
    "norm_softmax": False,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "use_cache": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_qk_norm": True,
    "pad_token_id": 156892,
    "torch_dtype": "bfloat16",
}
LLADA2_FLASH = LLADA2_MINI | {
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "moe_intermediate_size": 1024,
}
SDAR_8B = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "sliding_window": None,
    "use_sliding_window": False,
    "fuse_cross_entropy": False,
    "use_cache": False,
    "torch_dtype": "bfloat16",
}
SDAR_4B = SDAR_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
SDAR_1_7B = SDAR_8B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
SDAR_30B = SDAR_8B | {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "ep_size": 1,
    "use_deepep": False,
}
LLADA_8B = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "vocab_size": 126464,
    "embedding_size": 126464,
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "max_sequence_length": 4096,
    "rope": True,
    "rope_theta": 500000.0,
    "rope_full_precision": True,
    "rms_norm_eps": 1e-05,
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "weight_tying": False,
    "scale_logits": False,
    "input_emb_norm": False,
    "multi_query_attention": None,
    "eos_token_id": 126081,
    "mask_token_id": 126336,
    "pad_token_id": 126081,
    "torch_dtype": "bfloat16",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "embedding_dropout": 0.0,
    "flash_attention": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "layer_norm_with_affine": True,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "use_cache": False,
}
DIFFUCODER = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "pad_token_id": 151643,
    "mask_token_id": 151666,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "sliding_window": None,
    "max_window_layers": 28,
    "use_mrope": False,
    "attention_bias": True,
    "use_cache": True,
}
FAST_DLLM_V2 = {  # neither its mask nor its end of an answer stands in a file of the release
    **{k: v for k, v in DIFFUCODER.items() if k not in ("mask_token_id", "eos_token_id", "use_mrope")},
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "bd_size": 32,
    "max_position_embeddings": 32768,
    "layer_types": ["full_attention"] * 28,
}
FAST_DLLM_V2_SMALL = FAST_DLLM_V2 | {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
NEMOTRON_8B = {
    "architectures": ["NemotronLabsDiffusionModel"],
    "model_type": "nemotron_labs_diffusion",
    "ar_loss_weight": 1.0,
    "attention_bias": False,
    "block_size": 32,
    "bos_token_id": 1,
    "dlm_loss_weight": None,
    "dlm_paradigm": "bidirectional",
    "dp_varying_mask_ratio": False,
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mask_token_id": 100,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": False,
    "vocab_size": 131072,
}
NEMOTRON_3B = NEMOTRON_8B | {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26}
NEMOTRON_14B = NEMOTRON_8B | {
    "hidden_size": 5120,
    "intermediate_size": 16384,
    "num_hidden_layers": 40,
    "rope_parameters": NEMOTRON_8B["rope_parameters"] | {"rope_theta": 1e9},
}
GEMMA_TEXT = {
    "model_type": "diffusion_gemma_text",
    "vocab_size": 262144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_experts": 128,
    "top_k_experts": 8,
    "num_hidden_layers": 30,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "final_logit_softcapping": 30.0,
    "attention_bias": False,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "use_bidirectional_attention": "vision",
}
DIFFUSION_GEMMA_26B = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "model_type": "diffusion_gemma",
    "canvas_length": 256,
    "eos_token_id": [1, 106, 50],
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "tie_word_embeddings": True,
    "vision_soft_tokens_per_image": 280,
    "text_config": GEMMA_TEXT,
    "vision_config": {"model_type": "gemma4_vision"},
}
GEMMA_SAVED = DIFFUSION_GEMMA_26B | {  # as transformers 5.23 itself writes it
    "text_config": {k: v for k, v in GEMMA_TEXT.items() if "global" not in k}
    | {"per_layer_config": {str(n): {"head_dim": 512, "num_key_value_heads": 2} for n in range(5, 30, 6)}}
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49152,
}
IM_END = {"eos_token_id": [151645, 151643]}  # SDAR's generation_config.json


@dataclass(frozen=True)
class Release:
    """A release: its config.json, what is added in generation_config.json, and the model's size.

    `num_tensors` counts the tensors of its files, experts one by one.
    """

    config: dict[str, Any]
    generation: dict[str, Any]
    shape: ModelConfig
    num_parameters: float
    num_tensors: int


def sdar(config: dict[str, Any], block_size: int, shape: str, num_parameters: float, num_tensors: int) -> Release:
    wanted = replace(SHAPES[shape], block_size=block_size, eos_token_ids=(151643,))
    return Release(config, IM_END | {"block_size": block_size}, wanted, num_parameters, num_tensors)


MINI = Release(LLADA2_MINI, {}, SHAPES["llada2-mini"], 16.256e9, 14813)
MOE_SHAPE = read_config(SDAR_30B | {"mask_token_id": 151669, "block_size": 4})
RELEASES = {
    "LLaDA2-mini": MINI,
    "LLaDA2-mini, for training": replace(MINI, config=LLADA2_MINI | {"model_type": "llada2_moe_veomni"}),
    "LLaDA2-flash": Release(LLADA2_FLASH, {}, SHAPES["llada2-flash"], 102.89e9, 24161),
    **{f"SDAR-8B, blocks of {b}": sdar(SDAR_8B, b, "sdar-8b", 8.191e9, 399) for b in (4, 8, 16, 32, 64)},
    "SDAR-8B, for training": sdar(SDAR_8B | {"mask_token_id": 151669, "block_size": 4}, 4, "sdar-8b", 8.191e9, 399),
    "SDAR-4B": sdar(SDAR_4B, 4, "sdar-4b", 4.022e9, 398),
    "SDAR-1.7B": sdar(SDAR_1_7B, 4, "sdar-1.7b", 1.7206e9, 310),
    "SDAR-30B-A3B": Release(SDAR_30B, {"block_size": 4}, MOE_SHAPE, 30.532e9, 18867),
    "LLaDA-8B": Release(LLADA_8B, {}, SHAPES["llada-8b"], 8.02e9, 291),
    "Dream-7B": Release(DIFFUCODER, {}, SHAPES["dream-7b"], 7.616e9, 339),
    "Fast-dLLM-v2-7B": Release(FAST_DLLM_V2, {}, SHAPES["fast-dllm-v2-7b"], 7.616e9, 339),
    "DiffusionGemma-26B": Release(DIFFUSION_GEMMA_26B, {}, DIFFUSION_GEMMA, 25.251e9, 691),
    "DiffusionGemma-26B, saved anew": Release(GEMMA_SAVED, {}, DIFFUSION_GEMMA, 25.251e9, 691),
    "Fast-dLLM-v2-1.5B": Release(FAST_DLLM_V2_SMALL, {}, SHAPES["fast-dllm-v2-1.5b"], 1.5437e9, 338),
    "Nemotron-Labs-Diffusion-3B": Release(NEMOTRON_3B, {}, SHAPES["nemotron-3b"], 3.8296e9, 237),
    "Nemotron-Labs-Diffusion-8B": Release(NEMOTRON_8B, {}, SHAPES["nemotron-8b"], 8.4895e9, 309),
    "Nemotron-Labs-Diffusion-14B": Release(NEMOTRON_14B, {}, SHAPES["nemotron-14b"], 13.506e9, 363),
}


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_release_is_taken_at_its_size(release: Release) -> None:
    config = read_config(release.config, release.generation)
    assert config == release.shape == read_config(WRITTEN | release.config, release.generation)
    assert config.num_parameters == pytest.approx(release.num_parameters, rel=1e-3)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters
    assert len(tensors(config, "per_expert")) == release.num_tensors


def test_smollm2_is_taken_as_it_is_released() -> None:
    config = read_config(SMOLLM2 | {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}})
    assert config.num_parameters == pytest.approx(134.5e6, rel=1e-3) and len(tensors(config, "per_expert")) == 272
    with pytest.raises(ValueError, match="rope_interleaved=true"):
        read_config(SMOLLM2 | {"rope_interleaved": True})


def tensors(config: ModelConfig, experts: ExpertLayout) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in Decoder(config).state_dict().items()}
    return {name: stored.shape for name, stored in stored_tensors(config, shapes, experts).items()}


LAYER = "model.layers.7"
QWEN = {
    "model.embed_tokens.weight": "vd",
    f"{LAYER}.input_layernorm.weight": "d",
    f"{LAYER}.post_attention_layernorm.weight": "d",
    f"{LAYER}.self_attn.q_proj.weight": "qd",
    f"{LAYER}.self_attn.k_proj.weight": "kd",
    f"{LAYER}.self_attn.v_proj.weight": "kd",
    f"{LAYER}.self_attn.o_proj.weight": "dq",
    f"{LAYER}.mlp.gate_proj.weight": "fd",
    f"{LAYER}.mlp.up_proj.weight": "fd",
    f"{LAYER}.mlp.down_proj.weight": "df",
    "model.norm.weight": "d",
    "lm_head.weight": "vd",
}
QK_NORM = {f"{LAYER}.self_attn.q_norm.weight": "c", f"{LAYER}.self_attn.k_norm.weight": "c"}
BIASES = {f"{LAYER}.self_attn.{p}_proj.bias": size for p, size in (("q", "q"), ("k", "k"), ("v", "k"))}
EXPERTS = {
    f"{LAYER}.mlp.gate.weight": "ed",
    f"{LAYER}.mlp.experts.120.gate_proj.weight": "xd",
    f"{LAYER}.mlp.experts.120.up_proj.weight": "xd",
    f"{LAYER}.mlp.experts.120.down_proj.weight": "dx",
}
BLOCK = "model.transformer.blocks.7"
NAMES: dict[str, dict[str, str]] = {
    "SDAR-8B, blocks of 4": QWEN | QK_NORM,
    "SDAR-30B-A3B": {n: s for n, s in (QWEN | QK_NORM | EXPERTS).items() if f"{LAYER}.mlp" not in n or n in EXPERTS},
    "Dream-7B": QWEN | BIASES,
    "Fast-dLLM-v2-7B": QWEN | BIASES,
    "LLaDA2-mini": {
        "model.word_embeddings.weight": "vd",
        f"{LAYER}.input_layernorm.weight": "d",
        f"{LAYER}.post_attention_layernorm.weight": "d",
        f"{LAYER}.attention.query_key_value.weight": "ad",
        f"{LAYER}.attention.query_layernorm.weight": "c",
        f"{LAYER}.attention.key_layernorm.weight": "c",
        f"{LAYER}.attention.dense.weight": "dq",
        "model.layers.0.mlp.gate_proj.weight": "fd",
        "model.layers.0.mlp.up_proj.weight": "fd",
        "model.layers.0.mlp.down_proj.weight": "df",
        f"{LAYER}.mlp.gate.expert_bias": "e",
        f"{LAYER}.mlp.shared_experts.gate_proj.weight": "xd",
        f"{LAYER}.mlp.shared_experts.up_proj.weight": "xd",
        f"{LAYER}.mlp.shared_experts.down_proj.weight": "dx",
        "model.norm.weight": "d",
        "lm_head.weight": "vd",
        **EXPERTS,
    },
    "LLaDA-8B": {
        "model.transformer.wte.weight": "vd",
        f"{BLOCK}.attn_norm.weight": "d",
        f"{BLOCK}.ff_norm.weight": "d",
        f"{BLOCK}.q_proj.weight": "qd",
        f"{BLOCK}.k_proj.weight": "kd",
        f"{BLOCK}.v_proj.weight": "kd",
        f"{BLOCK}.attn_out.weight": "dq",
        f"{BLOCK}.ff_proj.weight": "fd",
        f"{BLOCK}.up_proj.weight": "fd",
        f"{BLOCK}.ff_out.weight": "df",
        "model.transformer.ln_f.weight": "d",
        "model.transformer.ff_out.weight": "vd",
    },
}
NAMES["LLaDA2-flash"] = NAMES["LLaDA2-mini"]
NAMES["Nemotron-Labs-Diffusion-8B"] = {
    {"lm_head.weight": "diffusion_head.weight"}.get(name, name.replace("model.", "encoder.", 1)): sizes
    for name, sizes in QWEN.items()
}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_the_published_names_and_shapes(name: str) -> None:
    """Those of layer 7 and of one expert for all, with sizes by letter; layer 0's where it is the dense one."""
    config = RELEASES[name].shape
    moe = config.moe
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {
        "v": config.vocab_size,
        "d": config.hidden_size,
        "f": config.intermediate_size,
        "c": config.head_dim,
        "q": heads,
        "k": kv_heads,
        "a": heads + 2 * kv_heads,
        "e": 0 if moe is None else moe.num_experts,
        "x": 0 if moe is None else moe.intermediate_size,
    }
    wanted = {tensor: tuple(sizes[letter] for letter in letters) for tensor, letters in NAMES[name].items()}
    found = tensors(config, "per_expert")
    assert {tensor: found.get(tensor) for tensor in wanted} == wanted
    assert {tensor for tensor in found if _shown(tensor)} == {tensor for tensor in wanted if _shown(tensor)}


def _shown(tensor: str) -> bool:
    """Whether a tensor lies in layer 7 or in none, and belongs to expert 120 or to none."""
    layer, expert = re.search(r"\.(?:layers|blocks)\.(\d+)\.", tensor), re.search(r"\.experts\.(\d+)\.", tensor)
    return (layer is None or layer[1] == "7") and (expert is None or expert[1] == "120")


def test_stacked_experts_have_the_training_names() -> None:
    found = tensors(SHAPES["llada2-mini"], "fused")
    assert len(found) == 278
    assert len(tensors(SHAPES["llada2-flash"], "fused")) == 446
    assert found["model.layers.7.mlp.experts.gate_proj"] == (256, 512, 2048)
    assert found["model.layers.7.mlp.experts.up_proj"] == (256, 512, 2048)
    assert found["model.layers.7.mlp.experts.down_proj"] == (256, 2048, 512)


def test_a_release_without_ids_is_known_by_its_vocabulary() -> None:
    """Only so: with another vocabulary, or where a file says otherwise, nothing is assumed."""
    assert "mask_token_id" not in LLADA2_MINI and "eos_token_id" not in LLADA2_MINI
    with pytest.raises(ValueError, match=r"mask_token_id.*generation_conf"):
        read_config(LLADA2_MINI | {"vocab_size": 157185})
    assert read_config(LLADA2_MINI, {"mask_token_id": 7}).mask_token_id == 7
    assert read_config(LLADA2_MINI | {"mask_token_id": 6}, {"mask_token_id": 7}).mask_token_id == 6
    with pytest.raises(ValueError, match=r"block_size.*generation_config"):
        read_config(SDAR_8B)  # b4 or b32: its name alone tells


LLADA2_2 = LLADA2_MINI | {
    "rope_theta": 3000000,
    "max_position_embeddings": 131072,
    "block_size": 32,
    "transformers_version": "5.2.0",
    "expert_capacity": 48,
    "delete_token_id": 156930,
    "split_token_id": 156931,
}
EDITS = {"delete_token_id", "split_token_id"}


def test_a_release_that_routes_by_block_is_read_as_one() -> None:
    """LLaDA2.2 has LLaDA2's architecture and tensors: only these keys show that it computes something else."""
    ids = {"mask_token_id": 156895, "eos_token_id": [156892, 156900]}
    config = read_config(LLADA2_2, ids)
    assert config.moe is not None and (config.moe.expert_capacity, config.block_size) == (48, 32)
    assert (config.delete_token_id, config.split_token_id) == (156930, 156931)
    assert read_config(write_config(config)) == config
    older = read_config({k: v for k, v in LLADA2_2.items() if k not in ("expert_capacity", *EDITS)}, ids)
    assert older.moe is not None and (older.moe.expert_capacity, older.delete_token_id) == (0, None)
    assert not EDITS & write_config(older).keys()
    for wrong in ({"expert_capacity": 7}, {"expert_capacity": 257}, {"split_token_id": None}):
        with pytest.raises(ValueError, match=next(iter(wrong)) if wrong.get("expert_capacity") else "delete_token_id"):
            read_config(LLADA2_2 | wrong, ids)
    with pytest.raises(ValueError, match="delete_token_id"):
        read_config(LLADA2_2 | {"delete_token_id": 156895}, ids)
