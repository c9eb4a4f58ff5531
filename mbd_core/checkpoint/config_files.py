"""A model folder's config.json and generation_config.json, which must agree with each other."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mbd_core.checkpoint.hf_config import read_config
from mbd_core.checkpoint.safetensor_files import read_json
from mbd_core.models.model_config import ModelConfig


def load_config(folder: Path) -> ModelConfig:
    """The model's configuration: config.json, with ids and block size from generation_config.json where it has none.

    If generation_config.json lists EOS ids, they count; they must include config.json's. Raises `ValueError` where
    the two files contradict each other.
    """
    config, generation = read_json(folder / "config.json"), load_generation_defaults(folder)
    try:
        return _with_eos_ids(read_config(config, generation), generation)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _with_eos_ids(config: ModelConfig, generation: Mapping[str, Any]) -> ModelConfig:
    """`config` with the EOS ids of `generation_config.json`, if it has any; the mask id must be the same in both."""
    mask, value = generation.get("mask_token_id"), generation.get("eos_token_id")
    if mask is not None and mask != config.mask_token_id:
        raise ValueError(f"generation_config.json says mask_token_id={mask}, config.json says {config.mask_token_id}")
    if value is None:
        return config
    eos = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in eos):
        raise ValueError(f"generation_config.json says eos_token_id={value!r}, which is no list of token ids")
    ours = list(config.eos_token_ids)
    if not set(ours) <= set(eos):
        raise ValueError(f"generation_config.json says eos_token_id={value}, config.json says {ours}")
    if set(eos) == set(ours):
        return config
    try:
        return replace(config, eos_token_ids=tuple(dict.fromkeys(eos)))
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None


def load_generation_defaults(folder: Path) -> dict[str, Any]:
    """The content of `generation_config.json`, the author's recommended decoding; empty if there is no such file."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}
