"""Reads LoRA adapters in PEFT's layout: a folder with adapter_config.json and adapter_model.safetensors.

The tensors have the names of the Hugging Face model that PEFT wrapped: `base_model.model.<module>.lora_A.weight` and
`lora_B.weight`, with the module names of the family. Trainers of sharded or compiled models may write other spellings
of these names (`_module_of`). An unsupported setting that changes the adapter's result is an error that names the
setting.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mbd_core.checkpoint.adaptation.trained_config import RECIPE, config_after, whole_recipe
from mbd_core.checkpoint.safetensor_files import DTYPES, open_file, read_json, without_wrappers
from mbd_core.checkpoint.tensors import StoredTensor, TensorShape, decoder_shapes, stored_tensors
from mbd_core.models.lora import Adapter, adapted_modules
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shard import Shard, split_dim

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "bias"}
TRAINING = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
"""Settings of the training or of PEFT itself, which do not change what the trained tensors compute."""

KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the base model's weights as they are. Other initialisations (PiSSA, OLoRA, CorDA, LoftQ,
LoRA-GA) need another base model than the published model."""

PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.(?P<name>.+))?\.weight")


def read_adapter(folder: Path, config: ModelConfig, *, shard: Shard | None = None) -> Adapter:
    """The adapter in `folder` for a model of `config`, in float32, with its scale (alpha / r, or alpha / sqrt r) in B.

    With a `shard`, `config` has one tensor-parallel rank's sizes, but the adapter has the whole model's. Raises
    `ValueError` naming the file, and the setting or tensor that does not fit.
    """
    rank, scale = rank_and_scale(folder)
    factors = _read_factors(folder, config, _whole_shapes(config, shard or Shard()), rank)
    products: dict[str, tuple[Tensor, Tensor]] = {}
    for stored, a, b in factors.values():
        for part, rows in zip(stored.parts, b.split(list(stored.lengths)), strict=True):
            products[part.target.removesuffix(".weight")] = a, rows * scale
    if not (folder / RECIPE).is_file():
        return Adapter(rank, products, ar_mode=config.ar_mode)
    trained = config_after(config, whole_recipe(folder / RECIPE, read_json(folder / RECIPE)))
    return Adapter(rank, products, ar_mode=trained.ar_mode, block_size=trained.block_size)


def read_changes(folder: Path, config: ModelConfig) -> dict[str, Callable[[], Tensor]]:
    """The changes that the adapter in `folder` adds to weights, by the weight's name in the checkpoint. Each function
    computes its change when it is called, in float32. Raises `ValueError` as `read_adapter` does.
    """
    rank, scale = rank_and_scale(folder)
    factors = _read_factors(folder, config, _whole_shapes(config, Shard()), rank)
    return {f"{module}.weight": partial(_change, a, b, scale) for module, (_, a, b) in factors.items()}


def _change(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return b @ a * scale


def rank_and_scale(folder: Path) -> tuple[int, float]:
    """The rank and the scale of the adapter in `folder`. Raises `ValueError` naming a setting that is not
    supported."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} is not an adapter folder: it has no {CONFIG}")
    try:
        return _rank_and_scale(read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _rank_and_scale(settings: Mapping[str, Any]) -> tuple[int, float]:
    """Raises `ValueError` naming a setting that is not supported."""
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"peft_type={settings.get('peft_type')!r} is not supported; only 'LORA' is")
    init = settings.get("init_lora_weights")
    if init not in KEEPS_BASE:
        raise ValueError(
            f"init_lora_weights={init!r} is not supported: it changes the base model's weights; save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    if settings.get("bias", "none") != "none":
        raise ValueError(f"bias={settings['bias']!r} is not supported; only 'none' is")
    for name, value in settings.items():
        if name not in READ | TRAINING and value not in (None, False, "", [], {}):
            raise ValueError(f"{name}={value!r} is not supported; train the adapter without it")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"r={rank!r} must be a whole number of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha={alpha!r} must be a number")
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _whole_shapes(config: ModelConfig, shard: Shard) -> dict[str, TensorShape]:
    """The shapes of the whole decoder's tensors; `config` may have one rank's sizes."""
    shapes = {}
    for name, shape in decoder_shapes(config).items():
        cut = split_dim(name)
        shapes[name] = tuple(size * (shard.size if dim == cut else 1) for dim, size in enumerate(shape))
    return shapes


def _read_factors(
    folder: Path, config: ModelConfig, shapes: Mapping[str, TensorShape], rank: int
) -> dict[str, tuple[StoredTensor, Tensor, Tensor]]:
    """The decoder's part, A (r, I) and B (O, r) of each module, by the checkpoint's name of the module."""
    path = folder / WEIGHTS
    if not path.exists():
        raise ValueError(f"{folder} lacks {WEIGHTS}; save the adapter as safetensors")
    stored = stored_tensors(config, shapes, "per_expert")
    adaptable = {f"{module}.weight" for _, _, module in adapted_modules(config)}
    pairs: dict[str, dict[str, Tensor]] = {}
    keys: dict[tuple[str, str], str] = {}
    names: dict[str, str] = {}
    with open_file(path) as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            match = _KEY.fullmatch(without_wrappers(key))
            if match is None:
                reason = (
                    "is a weight of the base model; save the adapter's own state"
                    if ".base_layer." in key
                    else f"is no LoRA matrix of a linear layer, {PREFIX}<module>.lora_A.weight or lora_B.weight"
                )
                raise ValueError(f"{path}: tensor '{key}' {reason}")
            module, factor = _module_of(match["module"], stored), match["factor"]
            names.setdefault(match["name"] or "", key)
            if len(names) > 1:
                raise ValueError(
                    f"{path} has both '{next(iter(names.values()))}' and '{key}', of different adapters; save each "
                    "adapter to a folder of its own"
                )
            if module is None:
                raise ValueError(
                    f"{path}: tensor '{key}' belongs to no module of {config.architecture}"
                    + _rename(match["module"], factor, stored)
                )
            weight = stored[f"{module}.weight"]
            if any(part.target not in adaptable for part in weight.parts):
                raise ValueError(
                    f"{path}: adapters of '{module}' are not supported; only those of the attention's projections and "
                    "of dense MLPs are"
                )
            if (other := keys.setdefault((module, factor), key)) != key:
                raise ValueError(
                    f"{path}: '{other}' and '{key}' are both lora_{factor} of '{module}'; keep one of them"
                )
            shape = (rank, weight.shape[1]) if factor == "A" else (weight.shape[0], rank)
            pairs.setdefault(module, {})[factor] = _read_matrix(path, file, key, shape)
    for module, pair in pairs.items():
        if len(pair) < 2:
            raise ValueError(f"{path}: module '{module}' has only lora_{next(iter(pair))} of its two matrices")
    if not pairs:
        raise ValueError(f"{path} holds no tensors")
    return {module: (stored[f"{module}.weight"], pair["A"], pair["B"]) for module, pair in pairs.items()}


def _module_of(written: str, stored: Mapping[str, StoredTensor]) -> str | None:
    """The checkpoint's module that an adapter's file calls `written`, `None` if there is no such module.

    `written` may lack PEFT's prefix. If PEFT wrapped only the inner model, `written` also lacks the beginning that the
    names of all modules share.
    """
    while written.startswith(PREFIX):
        written = written.removeprefix(PREFIX)
    if f"{written}.weight" in stored:
        return written
    modules = [name.removesuffix(".weight") for name in stored if name.endswith(f".{written}.weight")]
    return modules[0] if len(modules) == 1 else None


def _rename(written: str, factor: str, stored: Mapping[str, StoredTensor]) -> str:
    """The end of an error's message: the key to which the tensor may be renamed, if `written` ends with a module's
    name."""
    modules = [name.removesuffix(".weight") for name in stored if name.endswith(".weight")]
    ends = [module for module in modules if f".{written}".endswith(f".{module}")]
    return f"; if it is of '{ends[0]}', rename it to '{PREFIX}{ends[0]}.lora_{factor}.weight'" if ends else ""


def _read_matrix(path: Path, file: Any, key: str, shape: tuple[int, int]) -> Tensor:
    part = file.get_slice(key)
    if part.get_dtype() not in DTYPES:
        raise ValueError(f"{path}: tensor '{key}' has dtype {part.get_dtype()}; known: {', '.join(DTYPES)}")
    if tuple(part.get_shape()) != shape:
        raise ValueError(f"{path}: tensor '{key}' has shape {tuple(part.get_shape())}; this model asks for {shape}")
    matrix: Tensor = part[:].to(torch.float32)
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"{path}: tensor '{key}' has values that are not finite")
    return matrix
