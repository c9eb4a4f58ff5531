"""Conversion of checkpoints: single or stacked experts, Hugging Face folder or distributed checkpoint.

All layouts store the same decoder tensors (`tensor_names`), so every tensor of the target is assembled from tensors of
the source, a few in memory at a time. No value is changed or cast.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mbd_core.checkpoint.config_files import load_config
from mbd_core.checkpoint.dcp import DcpFolder, save_dcp
from mbd_core.checkpoint.families import FAMILIES
from mbd_core.checkpoint.safetensor_files import INDEX, MAX_SHARD_BYTES, METADATA, HfFolder, ShardWriter
from mbd_core.checkpoint.saving import MODEL_KIND, check_room
from mbd_core.checkpoint.tensor_matching import decoder_shapes, match_tensors
from mbd_core.checkpoint.tensor_names import ExpertLayout, StoredTensor, stored_tensors
from mbd_core.checkpoint.tensor_pieces import TensorPieces, WeightsFolder
from mbd_core.files import MANIFEST, check_target_folder, folder_beside, write_json
from mbd_core.models.model_config import ModelConfig

Format = Literal["hf", "dcp"]
# Files that are not copied: the weights that are converted, and the same weights in formats that we do not read.
WEIGHTS_ENDINGS = (".safetensors", ".distcp", ".bin", ".pt", ".pth", ".gguf", ".bin.index.json", INDEX, METADATA)


def convert(
    source: Path,
    target: Path,
    *,
    experts: ExpertLayout | None = None,
    to: Format | None = None,
    config_from: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the checkpoint `source` as a new folder `target`, and copy the files beside its weights.

    `experts` and `to` are the target's layout and format, `None`: the source's (our trainer's becomes "per_expert").
    `config_from` is the folder with config.json and tokenizer if the source has none. `progress` is called with the
    bytes written so far and the total. Raises `ValueError` for a target that `save_model` refuses, for wrong input,
    naming the file and the tensor, and for a disk without room, naming both sizes; no partial target remains.
    """
    check_target_folder(target, MODEL_KIND, overwrite=overwrite)
    beside_weights = config_from or source
    plan = _plan(source, beside_weights, target, experts=experts, to=to)
    done = 0
    check_room(target, plan.num_bytes)

    def make(name: str) -> Tensor:
        nonlocal done
        tensor = plan.pieces.make(plan.wanted[name])
        done += tensor.nbytes
        progress(done, plan.num_bytes)
        return tensor

    with folder_beside(target, MODEL_KIND, overwrite=overwrite) as beside:
        _copy_rest(beside_weights, beside, plan.config, fused=plan.fused)
        if plan.to == "dcp":
            metas = {n: torch.empty(s.shape, dtype=plan.dtypes[n], device="meta") for n, s in plan.wanted.items()}
            save_dcp(beside, metas, make, max_bytes=max_shard_bytes)
        else:
            writer = ShardWriter(beside, max_bytes=max_shard_bytes)
            for name in plan.wanted:
                writer.add(name, make(name))
            writer.close()


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A checked conversion: the target's tensors by name, their dtypes, and the source to assemble them from."""

    config: ModelConfig
    to: Format
    wanted: dict[str, StoredTensor]
    dtypes: dict[str, torch.dtype]
    pieces: TensorPieces

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(s.shape).numel() * self.dtypes[n].itemsize for n, s in self.wanted.items())

    @property
    def fused(self) -> bool:
        """Whether the target's experts are stacked."""
        parts = (part for stored in self.wanted.values() for part in stored.parts)
        return any(".mlp.experts." in part.target and part.expert is None for part in parts)


def _plan(
    source: Path, beside_weights: Path, target: Path, *, experts: ExpertLayout | None, to: Format | None
) -> _Plan:
    """Check the source's headers and plan the target; `ValueError` for a checkpoint that cannot be converted."""
    if (source / METADATA).exists() and not (beside_weights / "config.json").exists():
        raise ValueError(f"{beside_weights} has no config.json; name a folder that has one (--config)")
    config = load_config(beside_weights)
    for folder in (source, beside_weights):
        if target.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{target} lies inside {folder}, which is read; give a folder elsewhere")
        if folder.resolve().is_relative_to(target.resolve()):
            raise ValueError(f"{folder} lies inside {target}, which would be replaced; give a folder elsewhere")
    if experts == "fused" and config.moe is None:
        raise ValueError(f"experts='fused' stacks experts and the {config.architecture} in {beside_weights} has none")
    weights: WeightsFolder = DcpFolder(source) if (source / METADATA).exists() else HfFolder(source)
    _, stored, layout = match_tensors(source, config, weights.tensors)
    default_layout = layout if layout != "decoder" else "per_expert"
    wanted = stored_tensors(config, decoder_shapes(config), experts or default_layout)
    pieces = TensorPieces(weights, stored)
    return _Plan(
        config=config,
        to=to or ("dcp" if isinstance(weights, DcpFolder) else "hf"),
        wanted=wanted,
        dtypes={name: pieces.dtype(target_stored) for name, target_stored in wanted.items()},
        pieces=pieces,
    )


def _drop_quantization(path: Path) -> None:
    """Take `quantization_config` out of a config.json: FP8 weights are written as the bfloat16 they are read as."""
    config = json.loads(path.read_text())
    if config.pop("quantization_config", None) is not None:
        write_json(path, config)


def _copy_rest(source: Path, target: Path, config: ModelConfig, *, fused: bool) -> None:
    """Copy the files beside the weights, without the manifest.

    In families whose `model_type` says whether experts are stacked (`expert_model_types`), config.json gets the right
    one.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != MANIFEST and not path.name.endswith(WEIGHTS_ENDINGS):
            shutil.copyfile(path, target / path.name)
    _drop_quantization(target / "config.json")
    types = FAMILIES[config.architecture].expert_model_types
    if types is None:
        return
    text = (target / "config.json").read_text()
    old, new = json.loads(text).get("model_type"), types["fused" if fused else "per_expert"]
    if old is not None and old != new:
        text = re.sub(rf'("model_type"\s*:\s*)"{re.escape(old)}"', rf'\1"{new}"', text, count=1)
        (target / "config.json").write_text(text)
