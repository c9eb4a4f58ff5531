"""A model folder before its weights are read: its check, and the digest by which sweeps and trainings know it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.config import load_config, load_generation_defaults
from mbd_core.checkpoint.loading import refuse_dcp
from mbd_core.checkpoint.safetensor_files import list_tensors
from mbd_core.checkpoint.tensors import match_tensors
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import read_front
from mbd_core.files import MANIFEST
from mbd_core.models.model_config import ModelConfig

# The check of a model folder before its weights are read: configuration, tensors, tokenizer, recommended decoding.

METHOD_FIELDS = {f.name for f in fields(DecodingConfig)} - {"block_size"}


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A checkpoint folder whose files agree with each other; of the weights, only the headers were read.

    defaults      the content of `generation_config.json`, with a canvas if a full-attention model names no decoding
    stored_dtype  the dtype of most tensors
    """

    path: Path
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    defaults: dict[str, Any]
    stored_dtype: torch.dtype


def read_folder(folder: Path) -> ModelFolder:
    """Check everything of a model folder that can be checked without reading weights.

    Raises `ValueError`, one sentence that names the file and, where there is one, the tensor: for an unknown
    architecture, a distributed checkpoint, a missing shard, a file that is cut short, a missing or unexpected tensor
    or shape, a tokenizer or ids that do not fit the model, and decoding that cannot be honoured.
    """
    refuse_dcp(folder)
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
    """A `generation_config.json` with a decoding method: full-attention models decode whole canvases, unless it says
    otherwise."""
    if config.attention == "full" and not set(defaults) & METHOD_FIELDS:
        return {**defaults, "canvas": {}}
    return dict(defaults)


def edit_note(name: str, defaults: Mapping[str, Any], decoding: DecodingConfig) -> str | None:
    """A warning if `decoding` edits (T2T) and the model's `generation_config.json` does not recommend it."""
    if decoding.t2t is None or defaults.get("t2t") is not None:
        return None
    return (
        f"{name}: decoding.t2t was asked for, but its generation_config.json names none: a model that was not trained "
        "to edit its own tokens may overwrite right ones"
    )


# A digest of a model folder, by which sweeps and trainings know that they go on with the model they began with.

WHOLE_BYTES = 8 * 2**20  # a file of at most this size is read whole
NUM_PROBES, PROBE_BYTES = 64, 64 * 2**10  # of a larger one, evenly spread
LEFT_OUT = (MANIFEST, "generation_config.json")  # what it recommends is not what it is


def model_digest(folder: Path) -> str:
    """A hash of the files' names, sizes and contents; large files at 64 places, for training changes all of them.

    Of `generation_config.json` only the ids count that it decides together with `config.json`: those that end an
    answer, and the mask's. Raises `ValueError` where the two contradict each other.
    """
    config = load_config(folder)
    digest = hashlib.sha256(f"{sorted(config.eos_token_ids)} {config.mask_token_id}\n".encode())
    for file in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
        if file.name in LEFT_OUT or file.suffix == ".md":
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if size <= WHOLE_BYTES:
                digest.update(content.read())
                continue
            for number in range(NUM_PROBES):
                content.seek(number * (size - PROBE_BYTES) // (NUM_PROBES - 1))
                digest.update(content.read(PROBE_BYTES))
    return digest.hexdigest()[:16]
