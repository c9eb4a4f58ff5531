"""A model folder's config.json and generation_config.json: read as a `ModelConfig`, checked, and written back."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mbd_core.checkpoint.block_scales import block_shape
from mbd_core.checkpoint.families import FAMILIES, check_keys, family_of
from mbd_core.checkpoint.gemma_config import flat_config, nested_config
from mbd_core.checkpoint.model_family import Json
from mbd_core.checkpoint.safetensor_files import read_json
from mbd_core.models.model_config import GemmaLayers, ModelConfig, MoEConfig
from mbd_core.models.rope_scaling import ROPE_SCALINGS, RopeScaling

# Keys that generation_config.json may have instead of config.json.
DECODING_KEYS = ("mask_token_id", "eos_token_id", "block_size", "attention")
# The least value of each whole number that may be less than 1, and the greatest value of any whole number.
LEAST = {
    "mask_token_id": 0,
    "eos_token_ids": 0,
    "delete_token_id": 0,
    "split_token_id": 0,
    "num_shared_experts": 0,
    "first_dense_layers": 0,
    "dense_layers": 0,
    "expert_capacity": 0,
    "global_layers": 0,
}
MOST = 2**31 - 1


def read_config(config: Json, generation: Json | None = None) -> ModelConfig:
    """The `ModelConfig` of a parsed config.json; missing ids and block size come from `generation`.

    Raises `ValueError` naming the file and the key if a key is missing, if its value has the wrong type, if the
    decoder stack does not support the value, or if the key is unknown and may change the network's results.
    """
    architecture, family = family_of(config)
    block_shape(config)
    if family.text is not None:
        config = flat_config(config, family.text)
    config, scaling = _read_rope(config)
    if scaling is not None and not family.rope_scaling:
        raise ValueError(
            f"config.json scales rotary frequencies ({_scaling_name(scaling)}), which {architecture} does not; "
            "take a release without it"
        )
    config = _in_one_spelling({key: value for key, value in config.items() if value is not None}, family.spellings)
    if config.get("model_type", family.model_types[0]) not in family.model_types:
        raise ValueError(f"config.json has model_type={config['model_type']!r}, which is not {architecture}'s")
    for key, value in family.fixed.items():
        if key in config and (type(config[key]) is not type(value) or config[key] != value):
            raise ValueError(f"config.json has {key}={config[key]!r}; {architecture} is supported with {value!r} only")
    check_keys(config, architecture)
    recommended = {k: v for k, v in (generation or {}).items() if k in DECODING_KEYS and v is not None}
    published = family.published if config.get("vocab_size") in family.vocab_sizes else {}
    values = {**family.defaults, **published, **recommended, **config}
    if family.kv_heads_follow and (num_heads := family.keys["num_heads"]) in values:
        values.setdefault(family.keys["num_kv_heads"], values[num_heads])
    elsewhere = recommended.keys() - config.keys()

    def field_value(kind: type, ours: str, theirs: str) -> Any:
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
        head_dim = field_value(ModelConfig, "head_dim", "head_dim")
        rotary_dim = _rotary_dim(config, head_dim)
        values["rotary_dim"] = None if rotary_dim == head_dim else rotary_dim
    head_dim_follows = "head_dim" not in family.keys or (family.head_dim_follows and "head_dim" not in values)
    sizes = {
        ours: field_value(ModelConfig, ours, theirs)
        for ours, theirs in family.keys.items()
        if ours != "head_dim" or not head_dim_follows
    }
    if head_dim_follows:
        sizes["head_dim"], rest = divmod(sizes["hidden_size"], sizes["num_heads"])
        if rest:
            raise ValueError(
                f"config.json: hidden size {sizes['hidden_size']} has no {sizes['num_heads']} equal heads"
            )
        if config.get("head_dim", sizes["head_dim"]) != sizes["head_dim"]:
            raise ValueError(
                f"config.json has head_dim={config['head_dim']!r}; {architecture} has heads of {sizes['head_dim']}"
            )
    if sizes["vocab_size"] != config.get("embedding_size", sizes["vocab_size"]):
        raise ValueError(
            f"config.json has embedding_size={config['embedding_size']!r} and vocab_size={sizes['vocab_size']}; "
            "they must be equal"
        )
    experts = {ours: field_value(MoEConfig, ours, theirs) for ours, theirs in (family.moe_keys or {}).items()}
    layers = {ours: field_value(GemmaLayers, ours, theirs) for ours, theirs in family.gemma_keys.items()}
    try:
        moe = MoEConfig(**experts, **family.moe_switches) if experts else None
        more = {**family.switches, "gemma": GemmaLayers(**layers) if layers else None}
        return ModelConfig(architecture=architecture, **sizes, **more, rope_scaling=scaling, moe=moe)
    except ValueError as error:
        files = "config.json with generation_config.json" if elsewhere else "config.json"
        raise ValueError(f"{files}: {error}") from None


def _in_one_spelling(config: Json, spellings: Mapping[str, str]) -> dict[str, Any]:
    """`config` with the keys that the family uses; raises `ValueError` if two spellings of a key have two values."""
    spelled: dict[str, Any] = {}
    for key, value in config.items():
        name = spellings.get(key, key)
        if name in spelled and spelled[name] != value:
            raise ValueError(f"config.json has {name} and its other spelling with two values; remove one of them")
        spelled[name] = value
    return spelled


def _typed(hint: Any, value: Any, subject: str, least: int) -> Any:
    """`value` as a field of type `hint`; otherwise raises `ValueError` with a sentence that begins with `subject`."""

    def whole(number: Any) -> bool:
        return type(number) is int and least <= number <= MOST

    if hint is bool:
        fits, rule = type(value) is bool, "true or false"
    elif get_origin(hint) is Literal:
        fits, rule = value in get_args(hint), f"one of {', '.join(get_args(hint))}"
    elif hint is float:
        fits, rule = type(value) in (int, float) and 0 < value < math.inf, "a number above 0"
    elif hint == tuple[int, ...]:
        numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
        if all(whole(number) for number in numbers):
            return numbers
        fits, rule = False, f"a list of whole numbers from {least}"
    else:
        fits, rule = whole(value) or (value is None and hint == int | None), f"a whole number from {least} to {MOST}"
    if not fits:
        raise ValueError(f"{subject}={value!r}; it must be {rule}")
    return float(value) if hint is float else value


def write_config(config: ModelConfig, *, fused: bool = False) -> dict[str, Any]:
    """The `config.json` of a model, the inverse of `read_config`. `fused`: the checkpoint's experts are stacked.
    `ar_mode` stands in generation_config.json.

    Raises `ValueError` if the family has no key for a setting.
    """
    family = FAMILIES[config.architecture]
    eos = config.eos_token_ids
    values = {theirs: getattr(config, ours) for ours, theirs in family.keys.items()}
    values["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    scaling = {} if config.rope_scaling is None else _written_scaling(config.rope_scaling)
    if family.rope_parameters:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": values.pop("rope_theta"), **scaling}
    elif family.rope_scaling:
        values["rope_scaling"] = scaling or None
    if family.moe_keys is not None:
        assert config.moe is not None
        values |= {theirs: getattr(config.moe, ours) for ours, theirs in family.moe_keys.items()}
    values |= {theirs: getattr(config.gemma, ours) for ours, theirs in family.gemma_keys.items()}
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
        **{key: value for key, value in values.items() if value is not None},
    }
    if family.text is not None:
        written = nested_config(written, config, family.text)
    whole, network = config.rotary_dim == config.head_dim, replace(config, ar_mode=False)
    if read_config(written) != (replace(network, rotary_dim=None) if whole else network):
        raise ValueError(f"{config} cannot be written as a config.json of {config.architecture}")
    return written


# Keys of any rotation's object, beside the keys of its `rope_type`.
OF_ANY_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
TRAINED_LENGTH = "original_max_position_embeddings"


def _read_rope(config: Json) -> tuple[dict[str, Any], RopeScaling | None]:
    """`config` under the keys of older files, and the scaling of rotary frequencies.

    Values of transformers 5's `rope_parameters` move to the older keys. The scaling comes from there or from the older
    `rope_scaling`. Values that stand in two places must agree.
    """
    objects = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name) is not None}
    for name, rope in objects.items():
        if not isinstance(rope, dict):
            raise ValueError(f"config.json has {name}={rope!r}; it must be an object")
    scalings = [_scaling_of(name, rope, config) for name, rope in objects.items() if rope]
    if any(scaling != scalings[0] for scaling in scalings):
        raise ValueError("config.json has a rope_scaling that is not that of its rope_parameters; remove one of them")
    flat, scaling = dict(config), scalings[0] if scalings else None
    for name, rope in objects.items():
        for key in ("rope_theta", "partial_rotary_factor"):
            if rope.get(key) is None:
                continue
            if flat.get(key) not in (None, rope[key]):
                raise ValueError(
                    f"config.json has {key}={flat[key]!r}, and {rope[key]!r} in {name}; remove the value that is not "
                    "the model's"
                )
            flat[key] = rope[key]
    if hasattr(scaling, TRAINED_LENGTH):
        flat.pop(TRAINED_LENGTH, None)
    return flat, scaling


def _rope_type(rope: Json, name: str) -> Any:
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None] or ["default"]
    if kinds[0] != kinds[-1]:
        raise ValueError(f"config.json has rope_type={kinds[0]!r} and type={kinds[1]!r} in {name}; remove one of them")
    return kinds[0]


def _scaling_of(name: str, rope: Json, config: Json) -> RopeScaling | None:
    """The scaling in the object `rope` under the key `name`.

    A missing training length is the config's `max_position_embeddings`. As in transformers, a value of
    `original_max_position_embeddings` beside the object replaces the object's value.
    """
    kind = _rope_type(rope, name)
    if kind != "default" and (not isinstance(kind, str) or kind not in ROPE_SCALINGS):
        types = ", ".join(["default", *sorted(ROPE_SCALINGS)])
        raise ValueError(f"config.json has rope_type={kind!r} in {name}, which is not known; known: {types}")
    hints = {} if kind == "default" else get_type_hints(ROPE_SCALINGS[kind])
    values = {
        k: v for k, v in rope.items() if k not in OF_ANY_ROPE and (v is not None or k in hints.keys() & {"truncate"})
    }
    if TRAINED_LENGTH in hints:
        lengths = [config.get(TRAINED_LENGTH), values.get(TRAINED_LENGTH), config.get("max_position_embeddings")]
        values[TRAINED_LENGTH] = next((length for length in lengths if length is not None), None)
    for key, value in values.items():
        if key not in hints:
            raise ValueError(
                f"config.json has {key}={value!r} in {name}, which is not known; take a release without it"
            )
        subject, hint = f"config.json has {name}.{key}", next(iter(get_args(hints[key])), hints[key])
        values[key] = _typed(hint, value, subject, 1)
        if key == "factor" and values[key] < 1:
            raise ValueError(f"{subject}={value!r}; it must be a number of at least 1")
    if kind == "default":
        return None
    for item in fields(ROPE_SCALINGS[kind]):
        if item.default is MISSING and item.name not in values:
            raise ValueError(f"config.json has rope_type={kind!r} in {name} without '{item.name}', which it needs")
    try:
        return ROPE_SCALINGS[kind](**values)
    except ValueError as error:
        raise ValueError(f"config.json has a {name} with {error}") from None


def _scaling_name(scaling: RopeScaling) -> str:
    return next(name for name, kind in ROPE_SCALINGS.items() if isinstance(scaling, kind))


def _written_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """The `rope_scaling` of a config.json: the values that differ from the type's defaults."""
    defaults = {item.name: item.default for item in fields(scaling)}
    changes = {key: value for key, value in asdict(scaling).items() if value != defaults[key]}
    return {"rope_type": _scaling_name(scaling), **changes}


def _rotary_dim(config: Json, head_dim: int) -> int:
    """The number of a head's channels that rotate, from `rotary_dim` or `partial_rotary_factor`; by default all."""
    factor = config.get("partial_rotary_factor")
    if factor is not None and not _typed(float, factor, "config.json has partial_rotary_factor", 0) <= 1:
        raise ValueError(f"config.json has partial_rotary_factor={factor!r}; it must be at most 1")
    by_factor = head_dim if factor is None else int(head_dim * factor)
    by_number = _typed(int, config.get("rotary_dim", by_factor), "config.json has rotary_dim", 1)
    if factor is not None and by_number != by_factor:
        raise ValueError(f"config.json has rotary_dim={by_number} but partial_rotary_factor={factor} of {head_dim}")
    return by_number


def load_config(folder: Path) -> ModelConfig:
    """The model's configuration: config.json, with missing ids and block size from generation_config.json.

    EOS ids of generation_config.json replace config.json's, as in transformers. Raises `ValueError` if the two files
    have different mask ids.
    """
    config, generation = read_json(folder / "config.json"), load_generation_defaults(folder)
    named = {"mask_token_id": None, **generation, **config}["mask_token_id"]
    try:
        family = family_of(config)[1]
        if named is None and "mask_token_id" in family.keys and not family.published:
            generation = {**generation, "mask_token_id": _mask_of_tokenizer(folder)}
        return _with_ar_mode(_with_eos_ids(read_config(config, generation), generation), generation)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _mask_of_tokenizer(folder: Path) -> int | None:
    """The id of the mask token in the tokenizer's files, `None` without one."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    token = settings.get("mask_token")
    name = token.get("content") if isinstance(token, dict) else token
    added = [{"id": int(n), **entry} for n, entry in settings.get("added_tokens_decoder", {}).items()]
    if (folder / "tokenizer.json").exists():
        added += read_json(folder / "tokenizer.json").get("added_tokens", [])
    return next((entry["id"] for entry in added if name is not None and entry.get("content") == name), None)


def _with_eos_ids(config: ModelConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """`config` with the EOS ids of `generation_config.json`, if it has any; the mask id must be the same in both."""
    mask, value = generation.get("mask_token_id"), generation.get("eos_token_id")
    if mask is not None and mask != config.mask_token_id:
        raise ValueError(
            f"generation_config.json says mask_token_id={mask}, config.json says {config.mask_token_id}; write the id "
            "of the tokenizer's mask token into both"
        )
    if value is None:
        return config
    eos = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in eos):
        raise ValueError(f"generation_config.json says eos_token_id={value!r}, which is no list of token ids")
    if set(eos) == set(config.eos_token_ids):
        return config
    try:
        return replace(config, eos_token_ids=tuple(dict.fromkeys(eos)))
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None


def _with_ar_mode(config: ModelConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """`config` with the autoregressive mode that `generation_config.json` says the weights have."""
    value = generation.get("ar_mode", False)
    if not isinstance(value, bool):
        raise ValueError(f"generation_config.json says ar_mode={value!r}; it must be true or false")
    try:
        return replace(config, ar_mode=value)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}; leave ar_mode out") from None


def eos_origin(folder: Path) -> str:
    """A text on the EOS ids of `load_config`: the file that names them, and ids of config.json that end no answer."""
    config, generation = read_json(folder / "config.json"), load_generation_defaults(folder)
    _, family = family_of(config)
    named = (config if family.text is None else flat_config(config, family.text)).get("eos_token_id")
    if generation.get("eos_token_id") is None:
        return "config.json" if named is not None else "no file; the released vocabulary has them"
    ids = named if isinstance(named, list) else [named]
    unused = [str(token) for token in ids if token is not None and token not in load_config(folder).eos_token_ids]
    return "generation_config.json" + (f", without {', '.join(unused)} of config.json" if unused else "")


def load_generation_defaults(folder: Path) -> dict[str, Any]:
    """The content of `generation_config.json`, the author's recommended decoding; empty if there is no such file."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}
