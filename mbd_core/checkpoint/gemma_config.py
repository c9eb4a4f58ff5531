"""Flattens Gemma's config.json and nests it again: its text model's settings are nested, and its layers differ.

{"canvas_length": 256, "eos_token_id": [1, 106, 50], "text_config": {"head_dim": 256, "global_head_dim": 512, ...}}

becomes one object with one value a key, which `config.py` reads as any other. The global layers' heads stand in
`global_head_dim` and `num_global_key_value_heads`, as in releases, or in transformers' `per_layer_config`.
"""

from collections.abc import Mapping
from typing import Any

from mbd_core.checkpoint.model_family import Json
from mbd_core.models.model_config import ModelConfig

GLOBAL, SLIDING = "full_attention", "sliding_attention"
HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""The keys of a layer's entry in `per_layer_config`, and the release's keys for the same values."""
ROPES = {
    SLIDING: ("default", {"rope_theta": "rope_theta"}),
    GLOBAL: (
        "proportional",
        {"rope_theta": "global_rope_theta", "partial_rotary_factor": "global_partial_rotary_factor"},
    ),
}
"""For each kind of layer, its `rope_type` and our names of its settings."""


def flat_config(config: Json, text_key: str) -> dict[str, Any]:
    """A Gemma's config.json on one level: values at the top override the text model's under `text_key`.

    `layer_types` are the numbers of the global layers, and the rotation's values stand under `rope_theta`,
    `global_rope_theta` and `global_partial_rotary_factor`. Raises `ValueError` naming the key.
    """
    nested = config.get(text_key)
    if not isinstance(nested, dict):
        raise ValueError(f"config.json has {text_key}={nested!r}; it must be an object")
    top_type = config.get("model_type")
    text = {key: value for key, value in nested.items() if key != "model_type"}
    if top_type is not None and nested.get("model_type", f"{top_type}_text") != f"{top_type}_text":
        raise ValueError(f"config.json has {text_key}.model_type={nested['model_type']!r}, not '{top_type}_text'")
    layers = _global_layers(text, text_key)
    ropes, heads = _read_ropes(text.pop("rope_parameters", None)), text.pop("per_layer_config", None)
    text |= {"layer_types": layers} | ropes
    if heads:
        text |= _heads_of(heads, layers, text)
    top = {key: value for key, value in config.items() if key != text_key and value is not None}
    return {**text, **top}


def _global_layers(text: Json, text_key: str) -> list[int]:
    """The numbers of the global layers. transformers makes the last layer global, whatever its type."""
    types = text.get("layer_types")
    if not isinstance(types, list) or any(kind not in (GLOBAL, SLIDING) for kind in types):
        raise ValueError(f"config.json has {text_key}.layer_types={types!r}; it must list {GLOBAL} and {SLIDING}")
    if len(types) != text.get("num_hidden_layers"):
        raise ValueError(
            f"config.json has {len(types)} layer_types and num_hidden_layers={text.get('num_hidden_layers')!r}"
        )
    return [layer for layer, kind in enumerate(types) if kind == GLOBAL or layer == len(types) - 1]


def _read_ropes(ropes: Any) -> dict[str, Any]:
    """The rotation of both kinds of layers."""
    if not isinstance(ropes, dict) or set(ropes) != {GLOBAL, SLIDING}:
        raise ValueError(f"config.json has rope_parameters={ropes!r}; it must have {SLIDING} and {GLOBAL}")
    values = {}
    for name, (kind, keys) in ROPES.items():
        rope = dict(ropes[name] or {})
        if rope.pop("rope_type", "default") != kind:
            raise ValueError(
                f"config.json has rope_parameters.{name}={ropes[name]!r}; only rope_type={kind!r} is supported"
            )
        for key, value in rope.items():
            if key not in keys:
                raise ValueError(
                    f"config.json has {key}={value!r} in rope_parameters.{name}, which is not known; take a release "
                    "without it"
                )
            values[keys[key]] = value
    return values


def _heads_of(entries: Any, layers: list[int], text: Json) -> dict[str, Any]:
    """The heads of the global layers from `per_layer_config`. Missing layers or keys take the base values."""
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise ValueError(f"config.json has per_layer_config={entries!r}; it must be an object of objects")
    base = {key: text.get(key) for key in HEADS}
    for name, entry in entries.items():
        if not set(entry) <= set(HEADS) or name not in map(str, layers):
            raise ValueError(
                f"config.json has per_layer_config.{name}={entry!r}; only the {', '.join(HEADS)} of {GLOBAL} layers "
                "may differ"
            )
    kinds = {tuple((base | dict(entries.get(str(layer), {}))).values()) for layer in layers}
    if len(kinds) > 1:
        raise ValueError(f"config.json has a per_layer_config in which {GLOBAL} layers differ; they must be alike")
    return dict(zip(HEADS.values(), kinds.pop(), strict=True))


def nested_config(values: Mapping[str, Any], config: ModelConfig, text_key: str) -> dict[str, Any]:
    """A release's form of the flat `values` of a model, the inverse of `flat_config`."""
    assert config.gemma is not None
    top_keys = ("architectures", "model_type", "canvas_length", "eos_token_id", "tie_word_embeddings")
    text = {key: value for key, value in values.items() if key not in top_keys}
    ropes = {
        name: {"rope_type": kind, **{key: text.pop(flat) for key, flat in keys.items()}}
        for name, (kind, keys) in ROPES.items()
    }
    global_layers = config.gemma.global_layers
    text["layer_types"] = [GLOBAL if n in global_layers else SLIDING for n in range(config.num_layers)]
    top = {key: values[key] for key in top_keys if key in values}
    return {
        **top,
        text_key: {
            "model_type": f"{top['model_type']}_text",
            **text,
            "rope_parameters": ropes,
            "tie_word_embeddings": top["tie_word_embeddings"],
        },
    }
