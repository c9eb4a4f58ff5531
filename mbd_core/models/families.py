"""Model families as data: how a Hugging Face config.json becomes a `ModelConfig` and back, and how tensors are called.

A checkpoint is recognised by `architectures`, never by a name a user types. A family is a row of `FAMILIES`: its
config keys, the settings it is supported with, its switches on the one decoder stack, the module names that differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from mbd_core.models.config import ModelConfig, MoEConfig

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    `keys` and `moe_keys` name the config.json key of each `ModelConfig` and `MoEConfig` field; `defaults` are for keys
    (by config.json name) that real files leave out. `fixed` are config.json settings that we support with one value
    only, `switches` and `moe_switches` fields that follow from the architecture. `names` says what the checkpoint
    calls our modules (`{i}` a layer, `{e}` an expert); several of ours under one name lie there one after another.
    `model_types` are the `model_type`s found in the wild, the first is the one written, unless `expert_model_types`
    tells single experts from stacked ones.
    """

    model_types: tuple[str, ...]
    keys: Mapping[str, str]
    defaults: Json = field(default_factory=dict)
    fixed: Json = field(default_factory=dict)
    switches: Json = field(default_factory=dict)
    moe_keys: Mapping[str, str] | None = None
    moe_switches: Json = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    expert_model_types: Mapping[str, str] | None = None


# Ids and block size may stand in generation_config.json instead.
DECODING_KEYS = ("mask_token_id", "eos_token_id", "block_size")

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
QWEN_FIXED = {"attention_bias": False, "hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False}
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

SDAR = Family(model_types=("sdar",), keys=QWEN_KEYS, defaults={"tie_word_embeddings": False}, fixed=QWEN_FIXED)

SDAR_MOE = replace(
    SDAR,
    model_types=("sdar_moe",),
    defaults={"tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    moe_keys={**EXPERT_KEYS, "sparse_step": "decoder_sparse_step", "dense_layers": "mlp_only_layers"},
    moe_switches={"score": "softmax"},
    names=PER_EXPERT,
)

LLADA2_MOE = Family(
    model_types=("llada2_moe", "llada2_moe_veomni"),
    keys={**QWEN_KEYS, "rotary_dim": "rotary_dim"},
    defaults={
        "tie_word_embeddings": False,
        "block_size": 32,
        "num_shared_experts": 0,
        "moe_router_enable_expert_bias": False,
    },
    fixed={
        "hidden_act": "silu",
        "norm_head": False,
        "norm_softmax": False,
        "rope_scaling": None,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "use_bias": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "using_split_qkv_in_self_attention": False,
    },
    moe_keys={
        **EXPERT_KEYS,
        "num_shared_experts": "num_shared_experts",
        "num_groups": "n_group",
        "topk_groups": "topk_group",
        "routed_scaling": "routed_scaling_factor",
        "first_dense_layers": "first_k_dense_replace",
        "expert_bias": "moe_router_enable_expert_bias",
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
)

LLADA = Family(
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
)

DREAM = Family(
    model_types=("Dream",),
    keys=WITHOUT_HEAD_DIM,
    defaults={"tie_word_embeddings": False, "block_size": 32},
    fixed={"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False},
    switches={"qk_norm": False, "qkv_bias": True, "shift_logits": True, "attention": "full"},
)

FAMILIES: dict[str, Family] = {
    "SDARForCausalLM": SDAR,
    "SDARMoeForCausalLM": SDAR_MOE,
    "LLaDA2MoeModelLM": LLADA2_MOE,
    "LLaDAModelLM": LLADA,
    "DreamModel": DREAM,
}


def family_of(config: Json) -> tuple[str, Family]:
    """The architecture a parsed config.json names, and its family; `ValueError` lists ours if it is none of them."""
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ValueError(f"config.json has architectures={names}; supported: {', '.join(sorted(FAMILIES))}")
    return names[0], FAMILIES[names[0]]


def read_config(config: Json, generation: Json | None = None) -> ModelConfig:
    """The `ModelConfig` of a parsed config.json; ids and block size missing there are looked up in `generation`.

    Raises `ValueError` naming the key that is missing, or that has a value the stack does not compute.
    """
    architecture, family = family_of(config)
    config = _rope_in_place(config)
    if config.get("model_type", family.model_types[0]) not in family.model_types:
        raise ValueError(f"config.json has model_type={config['model_type']!r}, which is not {architecture}'s")
    for key, value in family.fixed.items():
        if config.get(key) is not None and config[key] != value:
            raise ValueError(f"config.json has {key}={config[key]!r}; {architecture} is supported with {value!r} only")
    config = {**family.defaults, **_decoding_part(generation), **{k: v for k, v in config.items() if v is not None}}

    def required(key: str) -> Any:
        if key not in config:
            where = "config.json has" if key not in DECODING_KEYS else "config.json and generation_config.json have"
            raise ValueError(f"{where} no '{key}', which {architecture} needs")
        return config[key]

    if "rotary_dim" in family.keys:
        rotated = _rotary_dim(config, _number(ModelConfig, "head_dim", "head_dim", required("head_dim")))
        config["rotary_dim"] = None if rotated == config["head_dim"] else rotated
    fields = {ours: _number(ModelConfig, ours, theirs, required(theirs)) for ours, theirs in family.keys.items()}
    eos = fields["eos_token_ids"]
    fields["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
    fields["rope_theta"] = float(fields["rope_theta"])
    if "head_dim" not in fields:
        fields["head_dim"], rest = divmod(fields["hidden_size"], fields["num_heads"])
        if rest:
            raise ValueError(
                f"config.json: hidden size {fields['hidden_size']} has no {fields['num_heads']} equal heads"
            )
    if fields["vocab_size"] != config.get("embedding_size", fields["vocab_size"]):
        raise ValueError(f"config.json has embedding_size={config['embedding_size']} beside another vocab_size")
    moe = None
    if family.moe_keys is not None:
        experts = {
            ours: _number(MoEConfig, ours, theirs, required(theirs)) for ours, theirs in family.moe_keys.items()
        }
        if "dense_layers" in experts:
            experts["dense_layers"] = tuple(experts["dense_layers"])
        moe = MoEConfig(**experts, **family.moe_switches)
    return ModelConfig(architecture=architecture, **fields, **family.switches, moe=moe)


def _number(kind: type, ours: str, theirs: str, value: Any) -> Any:
    """`value` as the field `ours` of `kind` takes it; `ValueError` names the key `theirs` if it is no such number."""
    hint = get_type_hints(kind)[ours]
    if hint not in (int, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
        raise ValueError(f"config.json has {theirs}={value!r}; it must be a {'whole ' if hint is int else ''}number")
    least = {"mask_token_id": 0, "first_dense_layers": 0, "num_shared_experts": 0}.get(ours, 1)
    if hint is int and value < least:
        raise ValueError(f"config.json has {theirs}={value}; it must be at least {least}")
    return value


def write_config(config: ModelConfig, *, fused: bool = False) -> dict[str, Any]:
    """The `config.json` of a model, the inverse of `read_config`; `ValueError` for what the family cannot say.

    `fused` says that the checkpoint's experts are stacked.
    """
    family = FAMILIES[config.architecture]
    eos = config.eos_token_ids
    values = {theirs: getattr(config, ours) for ours, theirs in family.keys.items()}
    values["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    if family.moe_keys is not None:
        assert config.moe is not None
        values |= {theirs: getattr(config.moe, ours) for ours, theirs in family.moe_keys.items()}
    if "mlp_only_layers" in values:
        values["mlp_only_layers"] = list(values["mlp_only_layers"])
    if "rotary_dim" in values:
        values["rotary_dim"] = config.num_rotated
        values["partial_rotary_factor"] = config.num_rotated / config.head_dim
        values["pad_token_id"] = eos[0]
    if config.architecture == "LLaDAModelLM":
        values["embedding_size"] = config.vocab_size
    kinds = family.expert_model_types
    written = {
        "architectures": [config.architecture],
        "model_type": family.model_types[0] if kinds is None else kinds["fused" if fused else "per_expert"],
        **family.fixed,
        **values,
    }
    whole = config.rotary_dim == config.head_dim
    if read_config(written) != (replace(config, rotary_dim=None) if whole else config):
        raise ValueError(f"{config} cannot be written as a config.json of {config.architecture}")
    return written


def _rope_in_place(config: Json) -> dict[str, Any]:
    """transformers 5 moved rope settings into `rope_parameters`: put them back where older files have them."""
    config = dict(config)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json has rope_type={rope['rope_type']!r}; 'default' only is supported")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope and config.get(key) is None:
            config[key] = rope[key]
    return config


def _decoding_part(generation: Json | None) -> dict[str, Any]:
    return {k: generation[k] for k in DECODING_KEYS if generation is not None and generation.get(k) is not None}


def _rotary_dim(config: Json, head_dim: int) -> int:
    """How many channels rotate, by number, by share of a head, or (neither given) all."""
    factor = config.get("partial_rotary_factor")
    by_factor = head_dim if factor is None else int(head_dim * factor)
    by_number = config.get("rotary_dim", by_factor)
    if factor is not None and by_number != by_factor:
        raise ValueError(f"config.json has rotary_dim={by_number} but partial_rotary_factor={factor} of {head_dim}")
    return by_number
