"""Conversion of checkpoints: single or stacked experts, Hugging Face folder or distributed checkpoint.

All layouts store the same decoder tensors (`tensors.py`), so every tensor of the target is assembled from tensors of
the source, a few in memory at a time. Tensors that the network does not use (`ModelFamily.skipped`) are copied. No
value is cast, and only a merged adapter changes values.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mbd_core.checkpoint import adapter as adapters
from mbd_core.checkpoint.adaptation.trained_config import RECIPE, config_after, whole_recipe
from mbd_core.checkpoint.base_files import files_beside_weights, read_configs
from mbd_core.checkpoint.base_values import check_base
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.dcp import DcpFolder, recorded_recipe, save_dcp
from mbd_core.checkpoint.families import FAMILIES
from mbd_core.checkpoint.loading import refuse_adapter_beside
from mbd_core.checkpoint.model_family import ExpertLayout, Format
from mbd_core.checkpoint.safetensor_files import MAX_SHARD_BYTES, METADATA, HfFolder, ShardWriter, read_json
from mbd_core.checkpoint.saving import MODEL_KIND, check_room, write_configs
from mbd_core.checkpoint.tensor_pieces import TensorPieces, WeightsFolder
from mbd_core.checkpoint.tensors import (
    FLOAT32_ALWAYS,
    StoredTensor,
    TensorShape,
    decoder_shapes,
    match_tensors,
    stored_tensors,
)
from mbd_core.checkpoint.tokenizer import has_tokenizer, load_tokenizer
from mbd_core.files import check_target_folder, folder_beside
from mbd_core.json_text import parse_json
from mbd_core.models.model_config import ModelConfig


def convert(
    source: Path,
    target: Path,
    *,
    experts: ExpertLayout | None = None,
    to: Format | None = None,
    config_from: Path | None = None,
    adapter: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda bytes_written, total: None,
) -> None:
    """Writes the checkpoint `source` as a new folder `target`, and copies the files beside its weights.

    `experts` and `to` are the target's layout and format; `None` keeps the source's (our trainer's layout becomes
    "per_expert"). `config_from` is the folder with config.json and tokenizer if the source has none. `adapter` is a
    LoRA adapter's folder; its changes are added to the weights in float32. If the folder has the recipe of its
    training, the recipe decides block size and recommended decoding. `progress` is called with the bytes written and
    the total.

    Raises `ValueError` for a target that `save_model` refuses; for wrong input, naming the file and the tensor; for a
    link out of the folder; and for a disk without room, naming both sizes. No partial target remains.
    """
    check_target_folder(target, MODEL_KIND, overwrite=overwrite)
    beside_weights = config_from or source
    plan = _plan(source, beside_weights, target, experts=experts, to=to, adapter=adapter)
    other_files = files_beside_weights(beside_weights)
    bytes_written = 0
    check_room(target, plan.num_bytes)

    def make(name: str) -> Tensor:
        nonlocal bytes_written
        kept = plan.kept.get(name)
        tensor = plan.pieces.make(plan.wanted[name]) if kept is None else kept.read(name)
        if name in plan.changes:
            tensor = (tensor.float() + plan.changes[name]()).to(tensor.dtype)
        bytes_written += tensor.nbytes
        progress(bytes_written, plan.num_bytes)
        return tensor

    with folder_beside(target, MODEL_KIND, overwrite=overwrite) as new_folder:
        for name, path in other_files.items():
            (new_folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, new_folder / name)
        if plan.recipe is None:
            _correct_config(new_folder / "config.json", plan)
        else:
            _write_trained(new_folder, plan, plan.recipe)
        if plan.to == "dcp":
            metas = {
                name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in plan.tensors.items()
            }
            save_dcp(new_folder, metas, make, max_bytes=max_shard_bytes)
        else:
            writer = ShardWriter(new_folder, max_bytes=max_shard_bytes)
            for name in plan.tensors:
                writer.add(name, make(name))
            writer.close()


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A checked conversion: the target's tensors by name, their dtypes, and their source.

    `kept` has the folder of each copied tensor, by name, and `changes` the change that an adapter adds to a tensor.
    `recipe` is our trainer's recipe, if our trainer wrote the source or the adapter. In this case `config` has the
    block size of the training.
    """

    config: ModelConfig
    to: Format
    wanted: dict[str, StoredTensor]
    dtypes: dict[str, torch.dtype]
    pieces: TensorPieces
    kept: dict[str, WeightsFolder]
    changes: Mapping[str, Callable[[], Tensor]]
    recipe: dict[str, Any] | None

    @property
    def tensors(self) -> dict[str, tuple[TensorShape, torch.dtype]]:
        """The shapes and dtypes of all tensors of the target."""
        infos = {name: folder.tensors[name] for name, folder in self.kept.items()}
        return {name: (stored.shape, self.dtypes[name]) for name, stored in self.wanted.items()} | {
            name: (info.shape, info.dtype) for name, info in infos.items()
        }

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most tensors."""
        dtypes = [dtype for name, dtype in self.dtypes.items() if not name.endswith(FLOAT32_ALWAYS)]
        return max(set(dtypes), key=dtypes.count)

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors.values())

    @property
    def fused(self) -> bool:
        """Whether the target's experts are stacked."""
        parts = (part for stored in self.wanted.values() for part in stored.parts)
        return any(".mlp.experts." in part.target and part.expert is None for part in parts)


def _plan(
    source: Path,
    beside_weights: Path,
    target: Path,
    *,
    experts: ExpertLayout | None,
    to: Format | None,
    adapter: Path | None,
) -> _Plan:
    """Checks the source's headers and plans the target. Raises `ValueError` for a checkpoint that cannot be
    converted."""
    if (source / METADATA).exists() and not (beside_weights / "config.json").exists():
        raise ValueError(f"{beside_weights} has no config.json; name a folder that has one (--config)")
    if adapter is None:
        refuse_adapter_beside(source)
    config = load_config(beside_weights)
    if has_tokenizer(beside_weights):
        load_tokenizer(beside_weights, config)
    for folder in (source, beside_weights, *([] if adapter is None else [adapter])):
        if target.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{target} lies inside {folder}, which is read; give a folder elsewhere")
        if folder.resolve().is_relative_to(target.resolve()):
            raise ValueError(f"{folder} lies inside {target}, which would be replaced; give a folder elsewhere")
    if experts == "fused" and config.moe is None:
        raise ValueError(f"experts='fused' stacks experts and the {config.architecture} in {beside_weights} has none")
    weights: WeightsFolder = DcpFolder(source) if (source / METADATA).exists() else HfFolder(source)
    _, stored, layout = match_tensors(source, config, weights.tensors)
    recipe = recorded_recipe(source)
    if adapter is not None and (adapter / RECIPE).is_file():
        recipe = whole_recipe(adapter / RECIPE, read_json(adapter / RECIPE))
    if recipe is not None:
        config = config_after(config, recipe)
    default_layout = layout if layout != "decoder" and recipe is None else "per_expert"
    wanted = stored_tensors(config, decoder_shapes(config), experts or default_layout)
    pieces = TensorPieces(weights, stored)
    changes = {} if adapter is None else adapters.read_changes(adapter, config)
    if adapter is not None and isinstance(weights, HfFolder):
        check_base(adapter, source)
    return _Plan(
        config=config,
        to=to or ("dcp" if isinstance(weights, DcpFolder) else "hf"),
        wanted=wanted,
        dtypes={name: pieces.dtype(target_stored) for name, target_stored in wanted.items()},
        pieces=pieces,
        kept=_kept(config, weights, beside_weights),
        changes=changes,
        recipe=recipe,
    )


def _kept(config: ModelConfig, weights: WeightsFolder, beside_weights: Path) -> dict[str, WeightsFolder]:
    """The folder of each tensor to copy, by the tensor's name: the tensors that the network does not use, from the
    source or, if it has none, from its base."""
    skipped = FAMILIES[config.architecture].skipped
    if not skipped:
        return {}
    kept = {name: weights for name in weights.tensors if name.startswith(skipped)}
    if kept or not any(beside_weights.glob("*.safetensors")):
        return kept
    base = HfFolder(beside_weights)
    return {name: base for name in base.tensors if name.startswith(skipped)}


def _write_trained(folder: Path, plan: _Plan, recipe: dict[str, Any]) -> None:
    """Writes the files of a training's export beside the weights; `folder` has the base's files."""
    base = read_configs(folder)
    write_configs(folder, plan.config, plan.dtype, fused=plan.fused, generation=recipe["generation"], base=base)
    (folder / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")


def _correct_config(path: Path, plan: _Plan) -> None:
    """Corrects the values of a copied config.json that are not true of the target's weights; other text stays.

    FP8 weights are written as bfloat16, as they are read. The dtype is the dtype of most tensors. In families whose
    `model_type` says whether experts are stacked (`expert_model_types`), `model_type` becomes the target's.
    """
    text = path.read_text()
    config = parse_json(text, str(path))
    if config.pop("quantization_config", None) is not None:
        text = json.dumps(config, indent=2) + "\n"
    types = FAMILIES[plan.config.architecture].expert_model_types
    values = {} if types is None else {"model_type": types["fused" if plan.fused else "per_expert"]}
    values |= dict.fromkeys(("dtype", "torch_dtype"), str(plan.dtype).removeprefix("torch."))
    for key, value in values.items():
        old_value = config.get(key)
        if old_value is not None and old_value not in (value, f"torch.{value}"):
            text = re.sub(rf'("{key}"\s*:\s*){re.escape(json.dumps(old_value))}', rf'\1"{value}"', text, count=1)
    path.write_text(text)
