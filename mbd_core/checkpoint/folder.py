"""The check of a model folder before its weights are read: configuration, tensors, tokenizer, recommended decoding."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.config import load_config, load_generation_defaults
from mbd_core.checkpoint.families import FAMILIES, default_method
from mbd_core.checkpoint.loading import refuse_adapter_beside, refuse_dcp
from mbd_core.checkpoint.safetensor_files import list_tensors
from mbd_core.checkpoint.tensors import match_tensors
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import read_front
from mbd_core.models.model_config import ModelConfig

METHOD_FIELDS = {f.name for f in fields(DecodingConfig)} - {"block_size"}


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A checkpoint folder whose files agree with each other. Of its weights only headers were read, and a few rows of
    a head that is stored beside tied embeddings.

    defaults      the content of `generation_config.json`, with the family's decoding method if the file names none
    stored_dtype  the dtype of most tensors
    """

    path: Path
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    defaults: dict[str, Any]
    stored_dtype: torch.dtype


def read_folder(folder: Path) -> ModelFolder:
    """Checks everything of a model folder that can be checked without reading weights.

    Raises `ValueError`, one sentence that names the file and, where there is one, the tensor. The causes: an unknown
    architecture, a distributed checkpoint, an adapter beside the weights, a missing shard, a file that is cut short, a
    missing or unexpected tensor or shape, a tokenizer or ids that do not fit the model, decoding that cannot be
    honoured.
    """
    refuse_dcp(folder)
    refuse_adapter_beside(folder)
    config = load_config(folder)
    tensors, _, _ = match_tensors(folder, config, list_tensors(folder))
    tokenizer = load_tokenizer(folder, config)
    defaults = with_method(load_generation_defaults(folder), config)
    try:
        block_size = defaults.get("block_size", config.block_size)
        decoding_config(defaults, {}, block_size=block_size)
        read_front(defaults, block_size=block_size)
    except ValueError as error:
        raise ValueError(f"{folder}: generation_config.json: {error}") from None
    dtypes = [info.dtype for info in tensors.values()]
    return ModelFolder(
        path=folder,
        config=config,
        tokenizer=tokenizer,
        defaults=defaults,
        stored_dtype=max(set(dtypes), key=dtypes.count),
    )


def with_method(defaults: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The content of a `generation_config.json` with a decoding method: the file's own method, or the family's method
    with the file's values under the release's keys."""
    family = FAMILIES[config.architecture]
    if set(defaults) & METHOD_FIELDS:
        return dict(defaults)
    settings = {ours: _value_at(defaults, theirs) for theirs, ours in family.generation.items()}
    settings = {name: value for name, value in settings.items() if value is not None}
    method = default_method(config.architecture, config.attention)
    part = next(iter(method), "")
    return {**defaults, **method, **({part: {**method[part], **settings}} if settings else {})}


def _value_at(values: Any, path: str) -> Any:
    """The value at a dotted path of a JSON object, `None` if there is none."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def edit_note(name: str, defaults: Mapping[str, Any], decoding: DecodingConfig) -> str | None:
    """A warning if `decoding` edits (T2T) and the model's `generation_config.json` does not recommend it."""
    if decoding.t2t is None or defaults.get("t2t") is not None:
        return None
    return (
        f"{name}: decoding.t2t was asked for, but its generation_config.json names none: a model that was not trained "
        "to edit its own tokens may overwrite right ones"
    )
