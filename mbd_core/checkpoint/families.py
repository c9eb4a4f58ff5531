"""Model families as data: how a Hugging Face config.json becomes a `ModelConfig` and back, and how tensors are called.

A checkpoint is recognised by `architectures`, never by a name a user types. A family is a row of `FAMILIES`: its
config keys, the settings it is supported with, its switches on the one decoder stack, the module names that differ.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from mbd_core.models.model_config import ModelConfig, MoEConfig

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    `keys` and `moe_keys` name the config.json key of each `ModelConfig` and `MoEConfig` field; `defaults` are for keys
    (by config.json name) that real files leave out. `fixed` are config.json settings that we support with one value
    only, `switches` and `moe_switches` fields that follow from the architecture. `names` says what the checkpoint
    calls our modules (`{i}` a layer, `{e}` an expert); several of ours under one name lie there one after another.
    `model_types` are the `model_type`s found in the wild, the first is the one written, unless `expert_model_types`
    tells single experts from stacked ones. `published` are the ids of the released vocabulary, for folders of that
    `vocab_size` whose files leave them out; the tokenizer must agree (`loader.load_tokenizer`).
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
    published: Json = field(default_factory=dict)


# Ids and block size may stand in generation_config.json instead.
DECODING_KEYS = ("mask_token_id", "eos_token_id", "block_size")
# The least value of whole numbers that may be less than 1, and the most of any.
LEAST = {"mask_token_id": 0, "eos_token_ids": 0, "num_shared_experts": 0, "first_dense_layers": 0, "dense_layers": 0}
MOST = 2**31 - 1

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

SDAR = Family(
    model_types=("sdar",),
    keys=QWEN_KEYS,
    defaults={"tie_word_embeddings": False},
    fixed=QWEN_FIXED,
    published={"vocab_size": 151936, "mask_token_id": 151669, "eos_token_id": 151643},
)

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
    published={"vocab_size": 157184, "mask_token_id": 156895, "eos_token_id": 156892},
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
    published={"vocab_size": 126464, "mask_token_id": 126336, "eos_token_id": 126081},
)

DREAM = Family(
    model_types=("Dream",),
    keys=WITHOUT_HEAD_DIM,
    defaults={"tie_word_embeddings": False, "block_size": 32},
    fixed={"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False},
    switches={"qk_norm": False, "qkv_bias": True, "shift_logits": True, "attention": "full"},
    published={"vocab_size": 152064, "mask_token_id": 151666, "eos_token_id": 151643},
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
    match config.get("architectures"):
        case [str(name)] if name in FAMILIES:
            return name, FAMILIES[name]
        case names:
            known = ", ".join(sorted(FAMILIES))
            raise ValueError(f"config.json has architectures={names!r}; supported: {known}, one of them alone")


def read_config(config: Json, generation: Json | None = None) -> ModelConfig:
    """The `ModelConfig` of a parsed config.json; ids and block size missing there are looked up in `generation`.

    Raises `ValueError` naming the file and the key that is missing, or that has a value of the wrong type or one that
    the stack does not compute.
    """
    architecture, family = family_of(config)
    if config.get("quantization_config") is not None:
        raise ValueError("config.json has a quantization_config; take a release whose weights are not quantized")
    config = {key: value for key, value in _rope_in_place(config).items() if value is not None}
    if config.get("model_type", family.model_types[0]) not in family.model_types:
        raise ValueError(f"config.json has model_type={config['model_type']!r}, which is not {architecture}'s")
    for key, value in family.fixed.items():
        if key in config and (type(config[key]) is not type(value) or config[key] != value):
            raise ValueError(f"config.json has {key}={config[key]!r}; {architecture} is supported with {value!r} only")
    recommended = {k: v for k, v in (generation or {}).items() if k in DECODING_KEYS and v is not None}
    published = family.published if config.get("vocab_size") == family.published.get("vocab_size") else {}
    values = {**family.defaults, **published, **recommended, **config}
    elsewhere = recommended.keys() - config.keys()

    def taken(kind: type, ours: str, theirs: str) -> Any:
        if theirs in values:
            file = "generation_config.json" if theirs in elsewhere else "config.json"
            return _typed(get_type_hints(kind)[ours], values[theirs], f"{file} has {theirs}", LEAST.get(ours, 1))
        if theirs in DECODING_KEYS:
            raise ValueError(
                f"config.json and generation_config.json have no '{theirs}', which {architecture} needs; "
                "add it to generation_config.json"
            )
        raise ValueError(f"config.json has no '{theirs}', which {architecture} needs")

    if "rotary_dim" in family.keys:
        head_dim = taken(ModelConfig, "head_dim", "head_dim")
        rotated = _rotary_dim(config, head_dim)
        values["rotary_dim"] = None if rotated == head_dim else rotated
    fields = {ours: taken(ModelConfig, ours, theirs) for ours, theirs in family.keys.items()}
    if "head_dim" not in fields:
        fields["head_dim"], rest = divmod(fields["hidden_size"], fields["num_heads"])
        if rest:
            raise ValueError(
                f"config.json: hidden size {fields['hidden_size']} has no {fields['num_heads']} equal heads"
            )
    if fields["vocab_size"] != config.get("embedding_size", fields["vocab_size"]):
        raise ValueError(f"config.json has embedding_size={config['embedding_size']!r} beside another vocab_size")
    experts = {ours: taken(MoEConfig, ours, theirs) for ours, theirs in (family.moe_keys or {}).items()}
    try:
        moe = MoEConfig(**experts, **family.moe_switches) if experts else None
        return ModelConfig(architecture=architecture, **fields, **family.switches, moe=moe)
    except ValueError as error:
        files = "config.json with generation_config.json" if elsewhere else "config.json"
        raise ValueError(f"{files}: {error}") from None


def _typed(hint: Any, value: Any, said: str, least: int) -> Any:
    """`value` as a field of type `hint` takes it; else `ValueError`, in a sentence that `said` begins."""

    def whole(number: Any) -> bool:
        return type(number) is int and least <= number <= MOST

    if hint is bool:
        fits, wanted = type(value) is bool, "true or false"
    elif hint is float:
        fits, wanted = type(value) in (int, float) and 0 < value < math.inf, "a number above 0"
    elif hint == tuple[int, ...]:
        numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
        if all(whole(number) for number in numbers):
            return numbers
        fits, wanted = False, f"a list of whole numbers from {least}"
    else:
        fits, wanted = whole(value) or (value is None and hint == int | None), f"a whole number from {least} to {MOST}"
    if not fits:
        raise ValueError(f"{said}={value!r}; it must be {wanted}")
    return float(value) if hint is float else value


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
    if not isinstance(rope, dict):
        raise ValueError(f"config.json has rope_parameters={rope!r}; it must be an object")
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json has rope_type={rope['rope_type']!r}; 'default' only is supported")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope and config.get(key) is None:
            config[key] = rope[key]
    return config


def _rotary_dim(config: Json, head_dim: int) -> int:
    """How many channels rotate, by number, by share of a head, or (neither given) all."""
    factor = config.get("partial_rotary_factor")
    if factor is not None and not _typed(float, factor, "config.json has partial_rotary_factor", 0) <= 1:
        raise ValueError(f"config.json has partial_rotary_factor={factor!r}; it must be at most 1")
    by_factor = head_dim if factor is None else int(head_dim * factor)
    by_number = _typed(int, config.get("rotary_dim", by_factor), "config.json has rotary_dim", 1)
    if factor is not None and by_number != by_factor:
        raise ValueError(f"config.json has rotary_dim={by_number} but partial_rotary_factor={factor} of {head_dim}")
    return by_number
