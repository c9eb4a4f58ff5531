"""Model families as data: their config.json keys, supported settings, and names of tensors.

The `architectures` of a config.json decide a checkpoint's family; the name that a user types does not. `config.py`
reads and writes a config.json by this table, and `tensors.py` names tensors by it.
"""

import json
from dataclasses import replace
from typing import Any

from mbd_core.checkpoint.model_family import (
    EVERYWHERE,
    OF_ANY_MODEL,
    OF_ANY_MOE,
    OLMO,
    READ_IN_ANY,
    WINDOW,
    Json,
    ModelFamily,
)
from mbd_core.models.model_config import NO_MASK

QWEN_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "mask_token_id": "mask_token_id",
    "eos_token_ids": "eos_token_id",
    "block_size": "block_size",
}
WITHOUT_HEAD_DIM = {ours: theirs for ours, theirs in QWEN_KEYS.items() if ours != "head_dim"}
QWEN_FIXED = {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False}
EXPERT_KEYS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
PER_EXPERT = {
    f"model.layers.{{i}}.mlp.experts.{p}_proj": f"model.layers.{{i}}.mlp.experts.{{e}}.{p}_proj.weight"
    for p in ("gate", "up", "down")
}

SDAR = ModelFamily(
    model_types=("sdar",),
    keys=QWEN_KEYS,
    defaults={"tie_word_embeddings": False},
    fixed=QWEN_FIXED,
    harmless=OF_ANY_MODEL | OF_ANY_MOE | WINDOW,
    accepted={**EVERYWHERE, "mlp_bias": (False,), "partial_rotary_factor": (1,), "use_regular_causal": (False,)},
    vocab_sizes=(151936,),
    published={"mask_token_id": 151669, "eos_token_id": 151643},
)

SDAR_MOE = replace(
    SDAR,
    model_types=("sdar_moe",),
    defaults={"tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    moe_keys={**EXPERT_KEYS, "sparse_step": "decoder_sparse_step", "dense_layers": "mlp_only_layers"},
    moe_switches={"score": "softmax"},
    names=PER_EXPERT,
)

LLADA2_MOE = ModelFamily(
    model_types=("llada2_moe", "llada2_moe_veomni"),
    keys={
        **QWEN_KEYS,
        "rotary_dim": "rotary_dim",
        "delete_token_id": "delete_token_id",
        "split_token_id": "split_token_id",
    },
    defaults={
        "tie_word_embeddings": False,
        "block_size": 32,
        "delete_token_id": None,
        "split_token_id": None,
        "expert_capacity": 0,
        "num_shared_experts": 0,
        "moe_router_enable_expert_bias": False,
    },
    fixed={
        "hidden_act": "silu",
        "norm_head": False,
        "norm_softmax": False,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_bias": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "using_split_qkv_in_self_attention": False,
    },
    # The shared experts' width is `num_shared_experts` times an expert's; otherwise their tensors do not fit.
    harmless=OF_ANY_MODEL | OF_ANY_MOE | WINDOW | {"moe_shared_expert_intermediate_size", "mtp_loss_scaling_factor"},
    accepted={
        **EVERYWHERE,
        "attention_bias": (False,),
        "moe_router_enable_routed_scaling": (True,),
        "moe_router_enable_shared_expert": (True,),
        "num_nextn_predict_layers": (0,),
        "use_fp8_experts": (False,),
        "use_qk_norm": (True,),
    },
    moe_keys={
        **EXPERT_KEYS,
        "num_shared_experts": "num_shared_experts",
        "num_groups": "n_group",
        "topk_groups": "topk_group",
        "routed_scaling": "routed_scaling_factor",
        "first_dense_layers": "first_k_dense_replace",
        "expert_bias": "moe_router_enable_expert_bias",
        "expert_capacity": "expert_capacity",
    },
    moe_switches={"score": "sigmoid"},
    expert_model_types={"per_expert": "llada2_moe", "fused": "llada2_moe_veomni"},
    names={
        "model.embed_tokens": "model.word_embeddings",
        **{f"model.layers.{{i}}.self_attn.{p}_proj": "model.layers.{i}.attention.query_key_value" for p in "qkv"},
        "model.layers.{i}.self_attn.q_norm": "model.layers.{i}.attention.query_layernorm",
        "model.layers.{i}.self_attn.k_norm": "model.layers.{i}.attention.key_layernorm",
        "model.layers.{i}.self_attn.o_proj": "model.layers.{i}.attention.dense",
        **PER_EXPERT,
    },
    vocab_sizes=(157184,),
    published={"mask_token_id": 156895, "eos_token_id": 156892},
)

LLADA = ModelFamily(
    model_types=("llada",),
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "num_kv_heads": "n_kv_heads",
        "rope_theta": "rope_theta",
        "rms_norm_eps": "rms_norm_eps",
        "max_positions": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
        "mask_token_id": "mask_token_id",
        "eos_token_ids": "eos_token_id",
        "block_size": "block_size",
    },
    defaults={"weight_tying": False, "block_size": 32},
    fixed={
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "block_type": "llama",
        "clip_qkv": None,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "multi_query_attention": None,
        "rope": True,
        "scale_logits": False,
    },
    harmless=OF_ANY_MODEL | OLMO,
    accepted={
        **EVERYWHERE,
        "bias_for_layer_norm": (False,),
        "layer_norm_with_affine": (True,),
        "norm_after": (False,),
        "rope_full_precision": (True,),
    },
    rope_scaling=False,
    switches={"qk_norm": False, "attention": "full"},
    names={
        "model.embed_tokens": "model.transformer.wte",
        "model.norm": "model.transformer.ln_f",
        "lm_head": "model.transformer.ff_out",  # the same leaf as a block's down projection
        **{
            f"model.layers.{{i}}.{ours}": f"model.transformer.blocks.{{i}}.{theirs}"
            for ours, theirs in {
                "input_layernorm": "attn_norm",
                "post_attention_layernorm": "ff_norm",
                "self_attn.q_proj": "q_proj",
                "self_attn.k_proj": "k_proj",
                "self_attn.v_proj": "v_proj",
                "self_attn.o_proj": "attn_out",
                "mlp.gate_proj": "ff_proj",
                "mlp.up_proj": "up_proj",
                "mlp.down_proj": "ff_out",
            }.items()
        },
    },
    vocab_sizes=(126464,),
    published={"mask_token_id": 126336, "eos_token_id": 126081},
    decoding={"canvas": {}},
)

DREAM = ModelFamily(
    model_types=("Dream",),
    keys=WITHOUT_HEAD_DIM,
    defaults={"tie_word_embeddings": False, "block_size": 32},
    fixed={"hidden_act": "silu", "use_sliding_window": False},
    harmless=OF_ANY_MODEL | WINDOW | {"attention_bias"},  # q, k and v have a bias whatever this key says
    accepted={**EVERYWHERE, "mlp_bias": (False,), "partial_rotary_factor": (1,), "use_mrope": (False,)},
    switches={"qk_norm": False, "qkv_bias": True, "shift_logits": True, "attention": "full"},
    vocab_sizes=(152064,),
    published={"mask_token_id": 151666, "eos_token_id": 151643},
    decoding={"canvas": {}},
)

# Qwen2.5 as a block-diffusion model. No release's config has the mask's id. 151665, and 151645 for the end of an
# answer, are default arguments of the released code, so they stand here. If a config names other ids, its ids count.
FAST_DLLM_V2 = replace(
    DREAM,
    model_types=("Fast_dLLM_Qwen",),
    keys={**WITHOUT_HEAD_DIM, "block_size": "bd_size"},
    defaults={"tie_word_embeddings": False, "bd_size": 32},
    switches={"qk_norm": False, "qkv_bias": True, "shift_logits": True},
    vocab_sizes=(151936, 152064),
    published={"mask_token_id": 151665, "eos_token_id": 151645},
    decoding={"carry": True, "sub_block": 8, "tau_m2t": 0.9},
)

# One set of weights for three methods. Keys are stored by causal rows. `dlm_paradigm` chooses a draft's attention.
NEMOTRON_LABS_DIFFUSION = replace(
    SDAR,
    model_types=("nemotron_labs_diffusion",),
    fixed={
        **QWEN_FIXED,
        "mlp_bias": False,
        "sliding_window": None,
        "dlm_paradigm": "bidirectional",
    },
    harmless=OF_ANY_MODEL | {"ar_loss_weight", "dlm_loss_weight", "dp_varying_mask_ratio"},
    accepted={**EVERYWHERE, "partial_rotary_factor": (1,)},
    rope_parameters=True,
    switches={"qk_norm": False, "attention": "causal"},
    names={
        "model.embed_tokens": "encoder.embed_tokens",
        "model.norm": "encoder.norm",
        "lm_head": "diffusion_head",
        **{
            f"model.layers.{{i}}.{module}": f"encoder.layers.{{i}}.{module}"
            for module in (
                "input_layernorm",
                "post_attention_layernorm",
                *(f"self_attn.{p}_proj" for p in "qkvo"),
                *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
            )
        },
    },
    vocab_sizes=(131072,),
    published={"mask_token_id": 100, "eos_token_id": 11},
    decoding={"causal": {}},
)

# Autoregressive models: the base of an adapted model, and the baseline of every table. They decode token by token.
AUTOREGRESSIVE: dict[str, Any] = {"mask_token_id": NO_MASK, "attention": "causal", "block_size": 1}
AR_KEYS = {ours: theirs for ours, theirs in QWEN_KEYS.items() if ours not in ("mask_token_id", "block_size")}
AR_DECODING = {"causal": {"method": "ar"}}

QWEN3 = replace(
    SDAR,
    model_types=("qwen3",),
    keys=AR_KEYS,
    harmless=SDAR.harmless | {"mask_token_id"},  # such a model never sees the mask; its conversion may have written it
    accepted=EVERYWHERE,
    switches=AUTOREGRESSIVE,
    vocab_sizes=(),
    published={},
    decoding=AR_DECODING,
)
QWEN3_MOE = replace(
    QWEN3,
    model_types=("qwen3_moe",),
    spellings={"num_local_experts": "num_experts"},
    head_dim_follows=True,
    defaults={**SDAR_MOE.defaults, "norm_topk_prob": False},
    moe_keys=SDAR_MOE.moe_keys,
    moe_switches=SDAR_MOE.moe_switches,
    names=PER_EXPERT,
)
LLAMA = replace(
    QWEN3,
    model_types=("llama",),
    defaults={"tie_word_embeddings": False, "rope_theta": 10000.0},
    fixed={"attention_bias": False, "hidden_act": "silu", "mlp_bias": False},
    harmless=QWEN3.harmless | {"max_sequence_length"},  # LLaMA 1's
    accepted={**EVERYWHERE, "is_llama_config": (True,), "rope_interleaved": (False,)},  # SmolLM2's
    head_dim_follows=True,
    kv_heads_follow=True,
    switches={**AUTOREGRESSIVE, "qk_norm": False},
)
MISTRAL = replace(
    LLAMA,
    model_types=("mistral",),
    fixed={"hidden_act": "silu", "sliding_window": None},
    harmless=OF_ANY_MODEL | {"mask_token_id"},
    kv_heads_follow=False,
)
QWEN2 = replace(
    LLAMA,
    model_types=("qwen2",),
    kv_heads_follow=False,
    fixed={"hidden_act": "silu", "use_sliding_window": False},
    accepted={**EVERYWHERE, "use_mrope": (False,)},
    switches={**AUTOREGRESSIVE, "qk_norm": False, "qkv_bias": True},
)


def _adapted(base: ModelFamily, model_type: str) -> ModelFamily:
    """The family of dllm's A2D folders of a base, with the base's keys and tensors.

    dllm's files have neither the mask, which is the tokenizer's, nor block size and attention. Our folders have all
    three.
    """
    own = ("mask_token_id", "block_size", "attention")
    return replace(
        base,
        model_types=(model_type,),
        keys={**base.keys, **{name: name for name in own}},
        defaults={**base.defaults, "block_size": 32, "attention": "block_causal"},
        harmless=base.harmless - {"mask_token_id"},
        switches={name: value for name, value in base.switches.items() if name not in own},
        decoding={},
    )


# DiffusionGemma's encoder and decoder share all weights except one number a layer. Only the text's weights are read.
GEMMA_LAYER = (
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "pre_feedforward_layernorm_2"),
    *("post_feedforward_layernorm", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
)
DIFFUSION_GEMMA = ModelFamily(
    model_types=("diffusion_gemma",),
    keys={
        **{ours: theirs for ours, theirs in QWEN_KEYS.items() if ours != "mask_token_id"},
        "block_size": "canvas_length",
    },
    defaults={"tie_word_embeddings": True, "canvas_length": 256},
    fixed={"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    harmless=OF_ANY_MODEL
    | OF_ANY_MOE
    | {
        "audio_config",
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
        "vision_config",
        "vision_soft_tokens_per_image",
    },
    accepted={"use_bidirectional_attention": ("vision",), "pruned_heads": ({},)},
    rope_scaling=False,
    switches={"mask_token_id": NO_MASK, "attention": "causal"},
    moe_keys={
        "num_experts": "num_experts",
        "experts_per_token": "top_k_experts",
        "intermediate_size": "moe_intermediate_size",
    },
    moe_switches={"score": "softmax", "norm_topk_prob": True},
    text="text_config",
    gemma_keys={
        "window": "sliding_window",
        "global_layers": "layer_types",
        "global_kv_heads": "num_global_key_value_heads",
        "global_head_dim": "global_head_dim",
        "global_rope_theta": "global_rope_theta",
        "global_rotated": "global_partial_rotary_factor",
        "softcap": "final_logit_softcapping",
    },
    skipped=("model.encoder.vision_tower.", "model.encoder.embed_vision."),
    names={
        "model.embed_tokens": "model.decoder.embed_tokens",
        "model.norm": "model.decoder.norm",
        "model.self_conditioning.pre_norm": "model.decoder.self_conditioning.pre_norm",
        **{
            f"model.self_conditioning.mlp.{p}_proj": f"model.decoder.self_conditioning.{p}_proj"
            for p in ("gate", "up", "down")
        },
        **{f"model.layers.{{i}}.{part}": f"model.decoder.layers.{{i}}.{part}" for part in GEMMA_LAYER},
        "model.layers.{i}.layer_scalar": "model.decoder.layers.{i}.layer_scalar",
        "model.layers.{i}.context_scalar": "model.encoder.language_model.layers.{i}.layer_scalar",
        "model.layers.{i}.router.weight": "model.decoder.layers.{i}.router.proj.weight",
        "model.layers.{i}.router": "model.decoder.layers.{i}.router",
        "model.layers.{i}.experts.gate_proj": "model.decoder.layers.{i}.experts.gate_up_proj",
        "model.layers.{i}.experts.up_proj": "model.decoder.layers.{i}.experts.gate_up_proj",
        "model.layers.{i}.experts": "model.decoder.layers.{i}.experts",
    },
    vocab_sizes=(262144,),
    published={"eos_token_id": (1, 106, 50)},
    decoding={"renoise": {}},
    generation={
        "max_denoising_steps": "steps",
        "t_max": "t_max",
        "t_min": "t_min",
        "stability_threshold": "stability",
        "confidence_threshold": "tau_entropy",
        "sampler_config.entropy_bound": "entropy_bound",
    },
)

FAMILIES: dict[str, ModelFamily] = {
    "SDARForCausalLM": SDAR,
    "SDARMoeForCausalLM": SDAR_MOE,
    "LLaDA2MoeModelLM": LLADA2_MOE,
    "LLaDAModelLM": LLADA,
    "DreamModel": DREAM,
    "Fast_dLLM_QwenForCausalLM": FAST_DLLM_V2,
    "NemotronLabsDiffusionModel": NEMOTRON_LABS_DIFFUSION,
    "DiffusionGemmaForBlockDiffusion": DIFFUSION_GEMMA,
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "A2DLlamaLMHeadModel": _adapted(LLAMA, "a2d-llama"),
    "A2DQwen2LMHeadModel": _adapted(QWEN2, "a2d-qwen2"),
    "A2DQwen3LMHeadModel": _adapted(QWEN3, "a2d-qwen3"),
}


def default_method(architecture: str, attention: str) -> Json:
    """The method of folders whose generation_config.json names none, as fields of `DecodingConfig`."""
    by_attention: dict[str, Json] = {"full": {"canvas": {}}, "causal": {"causal": {}}}
    return FAMILIES[architecture].decoding or by_attention.get(attention, {})


def family_of(config: Json) -> tuple[str, ModelFamily]:
    """The architecture in a parsed config.json, and its family. Raises `ValueError` listing the supported
    architectures."""
    match config.get("architectures"):
        case [str(name)] if name in FAMILIES:
            return name, FAMILIES[name]
        case names:
            known = ", ".join(sorted(FAMILIES))
            raise ValueError(f"config.json has architectures={names!r}; supported: exactly one of {known}")


def check_keys(config: Json, architecture: str) -> None:
    """Raises `ValueError` naming the keys of a parsed config.json that are not read and may change the network's
    results."""
    family = FAMILIES[architecture]
    read = {*family.keys.values(), *(family.moe_keys or {}).values(), *family.fixed, *READ_IN_ANY}
    read |= {*family.gemma_keys.values()}
    read |= {"partial_rotary_factor"} if "rotary_dim" in family.keys else set()
    read |= {"rope_scaling"} if family.rope_scaling else set()
    unknown_keys = [
        key
        for key, value in config.items()
        if value is not None and key not in read | family.harmless and not _is_accepted(family, key, value)
    ]
    if unknown_keys:
        settings = [f"{key}={_value_text(config[key])}" for key in unknown_keys]
        which = ("it", "the key", "it changes") if len(settings) == 1 else ("them", "the keys", "they change")
        raise ValueError(
            f"config.json has {', '.join(settings)}, which this project's {architecture} does not know; take a "
            f"release without {which[0]}, or remove {which[1]} if {which[2]} nothing that the network computes"
        )


def _is_accepted(family: ModelFamily, key: str, value: Any) -> bool:
    """Whether this value of an unread key leaves the network as it is."""
    accepted_values = family.accepted.get(key)
    values = value if isinstance(value, list) else [value]
    return accepted_values is not None and all(item in accepted_values for item in values)


def _value_text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
