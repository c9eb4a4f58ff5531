"""Model families as data: how a Hugging Face `config.json` becomes a `ModelConfig`, and back.

A checkpoint is recognised by `architectures`, never by a name a user types. SDAR's tensor names are the stack's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mbd_core.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: its config mapping in both directions."""

    read: Callable[[dict[str, Any]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]


def _require(config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json has no '{key}', which {config['architectures'][0]} needs")
    return config[key]


def _ids(value: int | list[int]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


SDAR_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
    "use_sliding_window": False,
}


def _read_sdar(config: dict[str, Any]) -> ModelConfig:
    for key, value in SDAR_FIXED.items():
        if config.get(key, value) != value:
            raise ValueError(f"config.json has {key}={config[key]!r}; SDAR is supported with {value!r} only")
    return ModelConfig(
        architecture="SDARForCausalLM",
        vocab_size=_require(config, "vocab_size"),
        hidden_size=_require(config, "hidden_size"),
        intermediate_size=_require(config, "intermediate_size"),
        num_layers=_require(config, "num_hidden_layers"),
        num_heads=_require(config, "num_attention_heads"),
        num_kv_heads=_require(config, "num_key_value_heads"),
        head_dim=_require(config, "head_dim"),
        rope_theta=float(_require(config, "rope_theta")),
        rms_norm_eps=_require(config, "rms_norm_eps"),
        max_positions=_require(config, "max_position_embeddings"),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        mask_token_id=_require(config, "mask_token_id"),
        eos_token_ids=_ids(_require(config, "eos_token_id")),
        block_size=_require(config, "block_size"),
    )


def _write_sdar(config: ModelConfig) -> dict[str, Any]:
    eos = config.eos_token_ids
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        "block_size": config.block_size,
    }


FAMILIES: dict[str, Family] = {"SDARForCausalLM": Family(read=_read_sdar, write=_write_sdar)}


def read_config(config: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a parsed `config.json`; an architecture we do not know is a `ValueError` naming ours."""
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ValueError(f"config.json has architectures={names}; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[names[0]].read(config)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model, the inverse of `read_config`."""
    return FAMILIES[config.architecture].write(config)
