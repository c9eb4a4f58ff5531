"""Writes model folders: config.json, safetensors, tokenizer, generation_config.json, manifest; and adapters.

A folder is written beside its target and then renamed, so no partial folder appears. An existing target is refused.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mbd_core.checkpoint.base_files import BaseFiles, carried_config, carried_generation
from mbd_core.checkpoint.config import write_config
from mbd_core.checkpoint.families import default_method
from mbd_core.checkpoint.model_family import ExpertLayout
from mbd_core.checkpoint.safetensor_files import MAX_SHARD_BYTES, ShardWriter
from mbd_core.checkpoint.tensors import FLOAT32_ALWAYS, decoder_shapes, stored_tensors
from mbd_core.files import check_target_folder, folder_beside, write_json
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.quantize import quantized_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GATHERED = 3  # tensors kept in memory: a layer's stacked experts are three, and are written expert by expert
MODEL_KIND = "model"  # the kind in the manifests of model folders and of distributed checkpoints


def save_model(
    folder: Path,
    model: Decoder,
    *,
    base: BaseFiles | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    generation: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    extra: dict[str, str] | None = None,
    experts: ExpertLayout = "per_expert",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Writes a complete model folder; `extra` adds small text files (name -> content).

    The folder takes over the unused tensors of `base`, its files beside the weights, and its tokenizer if `tokenizer`
    is `None`. Weights are cast to `dtype` (`None`: no cast), except the router's `expert_bias`, which is float32.
    Raises `ValueError` for a part of a sharded model and for FP8 weights. Raises it too for a folder that exists and
    is not empty, unless `overwrite` is given and the project wrote it (`files.check_target_folder`).
    """
    check_target_folder(folder, MODEL_KIND, overwrite=overwrite)
    if model.shard.size > 1:
        raise ValueError(f"rank {model.shard.rank} of {model.shard.size} holds only its part of the model to be saved")
    if quantized_parts(model) is not None:
        raise ValueError("the model's weights were rounded to FP8; save the model that it was made from")
    config_dtype = dtype or model.model.embed_tokens.weight.dtype
    tensors = (
        (name, tensor.detach().to(torch.float32 if name.endswith(FLOAT32_ALWAYS) else dtype))
        for name, tensor in checkpoint_tensors(model, experts)
    )
    with folder_beside(folder, MODEL_KIND, overwrite=overwrite) as new_folder:
        if base is not None:
            base.write_others(new_folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(new_folder)
        others = () if base is None else base.tensors.items()
        every = chain(tensors, others)
        _write(new_folder, model.config, every, config_dtype, experts, max_shard_bytes, generation, base)
        for name, text in (extra or {}).items():
            (new_folder / name).write_text(text)


def save_random(
    config: ModelConfig,
    folder: Path,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda bytes_written, total: None,
) -> None:
    """Writes a folder of random weights in a real model's layout, with about one shard at a time in memory.

    Without a `tokenizer` the folder cannot be served. `progress` is called with the bytes written and the total.
    Before it writes, it raises `ValueError` for a target that `save_model` refuses and for a disk without room.
    """
    check_target_folder(folder, MODEL_KIND, overwrite=overwrite)
    generator = torch.Generator().manual_seed(seed)
    stored = stored_tensors(config, decoder_shapes(config), "per_expert")
    dtypes = {name: torch.float32 if name.endswith(FLOAT32_ALWAYS) else dtype for name in stored}
    total, bytes_written = sum(math.prod(s.shape) * dtypes[name].itemsize for name, s in stored.items()), 0
    check_room(folder, total)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal bytes_written
        for name, target in stored.items():
            tensor = torch.empty(target.shape, dtype=dtypes[name])
            if tensor.ndim > 1:
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            bytes_written += tensor.nbytes
            progress(bytes_written, total)
            yield name, tensor

    with folder_beside(folder, MODEL_KIND, overwrite=overwrite) as new_folder:
        if tokenizer is not None:
            tokenizer.save_pretrained(new_folder)
        _write(new_folder, config, tensors(), dtype, "per_expert", max_shard_bytes, random_generation(config))


def random_generation(config: ModelConfig) -> dict[str, Any]:
    """The decoding of random weights, which are never confident: a fixed number of tokens a step.

    Models without block-causal attention need no such number: each step on a canvas takes a token, each verified draft
    gives a token, and a drawn canvas ends after a set number of steps at most.
    """
    if config.attention != "block_causal":
        return {}
    method = default_method(config.architecture, config.attention)
    return {**method, "buffer_size": 2, "tokens_per_step": min(4, config.block_size)}


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise `ValueError` if the disk on which `folder` will lie has less than `num_bytes` free."""
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise ValueError(f"{folder} needs {num_bytes:,} bytes and {existing} has {free:,} free; choose another disk")


def checkpoint_tensors(model: Decoder, experts: ExpertLayout) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors one by one, with the names and shapes of its family's checkpoints.

    Sharded tensors are gathered a few at a time, so every worker must iterate.
    """
    state = model.state_dict()
    shapes = {name: tuple(t.shape) for name, t in state.items()}

    @lru_cache(maxsize=GATHERED)
    def whole(name: str) -> Tensor:
        tensor = state[name]
        return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor

    for name, stored in stored_tensors(model.config, shapes, experts).items():
        parts = [whole(p.target) if p.expert is None else whole(p.target)[p.expert] for p in stored.parts]
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts, dim=stored.dim)


def _write(
    folder: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    experts: ExpertLayout,
    max_shard_bytes: int,
    generation: Mapping[str, Any] | None = None,
    base: BaseFiles | None = None,
) -> None:
    """Write safetensors, config.json and generation_config.json."""
    writer = ShardWriter(folder, max_bytes=max_shard_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.close()
    write_configs(folder, config, dtype, fused=experts == "fused", generation=generation, base=base)


def write_configs(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    fused: bool,
    generation: Mapping[str, Any] | None,
    base: BaseFiles | None,
) -> None:
    """Write config.json, and generation_config.json with ids, block size and recommended decoding."""
    ids: dict[str, Any] = {"eos_token_id": list(config.eos_token_ids)}
    if config.has_mask:
        ids["mask_token_id"] = config.mask_token_id
    if config.ar_mode:
        ids["ar_mode"] = True
    base = base or BaseFiles(config={}, generation={}, others={})
    written, recommended = write_config(config, fused=fused), {**ids, "block_size": config.block_size}
    files = {
        "config.json": carried_config(base.config, written, str(dtype).removeprefix("torch.")),
        "generation_config.json": carried_generation(base.generation, {**recommended, **(generation or {})}),
    }
    for name, content in files.items():
        write_json(folder / name, content)


Factors = Mapping[str, tuple[Tensor, Tensor]]
