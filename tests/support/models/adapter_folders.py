"""LoRA adapters with random weights in PEFT's layout, and models into whose weights they are merged."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mbd_core.checkpoint.tensors import decoder_shapes, stored_tensors
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig

PREFIX = "base_model.model."
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adaptable(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The Hugging Face modules that an adapter can change, and their weights' shapes (O, I)."""
    shapes = {}
    for name, stored in stored_tensors(config, decoder_shapes(config), "per_expert").items():
        targets = [part.target for part in stored.parts]
        if all(t.removesuffix(".weight").endswith(LEAVES) and ".experts." not in t for t in targets):
            shapes[name.removesuffix(".weight")] = (stored.shape[0], stored.shape[1])
    return {name: shape for name, shape in shapes.items() if not name.endswith("bias")}


def write_adapter(
    folder: Path, config: ModelConfig, *, seed: int, rank: int = 2, std: float = 0.3, **settings: Any
) -> Path:
    """An adapter of every module it can change; `settings` go into its adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (outputs, inputs) in adaptable(config).items():
        for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"{PREFIX}{module}.lora_{factor}.weight"] = torch.randn(shape, generator=generator) * std
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    write_settings(folder, r=rank, **settings)
    return folder


def write_settings(folder: Path, **settings: Any) -> None:
    """What PEFT itself writes, changed by `settings`."""
    whole = {"peft_type": "LORA", "lora_alpha": 3, "bias": "none", "use_rslora": False, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(whole | {"target_modules": None} | settings))


def merged(model: Decoder, folder: Path) -> Decoder:
    """A copy of a whole model with an adapter in its weights: W + scale B A."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    rank = settings["r"]
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings["use_rslora"] else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    out = copy.deepcopy(model)
    weights = out.state_dict()
    stored = stored_tensors(model.config, decoder_shapes(model.config), "per_expert")
    for key in [k for k in tensors if k.endswith("lora_A.weight")]:
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        change = scale * b.double() @ a.double()
        place = stored[key.removeprefix(PREFIX).removesuffix(".lora_A.weight") + ".weight"]
        for part, rows in zip(place.parts, change.split(list(place.lengths)), strict=True):
            weight = weights[part.target]
            weight.copy_(weight.double() + rows)
    return out
