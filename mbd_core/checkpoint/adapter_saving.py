"""Writes LoRA adapters in PEFT's layout, which `adapter.py` reads. Serving does not import this file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mbd_core.checkpoint import adapter
from mbd_core.checkpoint.base_values import RECORD
from mbd_core.checkpoint.safetensor_files import write_safetensors
from mbd_core.checkpoint.saving import MODEL_KIND, Factors
from mbd_core.checkpoint.tensors import StoredTensor, decoder_shapes, stored_tensors
from mbd_core.files import folder_beside, write_json
from mbd_core.models.model_config import ModelConfig


def save_adapter(
    folder: Path,
    config: ModelConfig,
    factors: Factors,
    *,
    rank: int,
    alpha: int,
    dropout: float,
    base: str,
    base_values: Mapping[str, Sequence[float]],
    extra: Mapping[str, str],
    overwrite: bool = False,
) -> None:
    """Writes an adapter as PEFT does, with the module names of the family's published checkpoints.

    `factors` are A (rank, I) and B (O, rank) of each adapted module, by the decoder's names. Modules that the family
    stores as one, like a fused query, key and value, get one adapter: their A's stacked, their B's block-diagonal. All
    modules then get the rank of this adapter, padded with zeros. `base_values` are the base's (`base_values.py`), and
    `base` is its name or path. `extra` adds small text files. Raises `ValueError` as
    `files.check_target_folder` does.
    """
    stored = stored_tensors(config, decoder_shapes(config), "per_expert")
    adapted = {
        name.removesuffix(".weight"): tensor
        for name, tensor in stored.items()
        if any(part.target.removesuffix(".weight") in factors for part in tensor.parts)
    }
    joined = max(len(tensor.parts) for tensor in adapted.values())
    tensors = {
        f"base_model.model.{module}.lora_{factor}.weight": matrix
        for module, tensor in adapted.items()
        for factor, matrix in zip("AB", _join_factors(tensor, factors, rank, joined), strict=True)
    }
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": rank * joined,
        "lora_alpha": alpha * joined,
        "lora_dropout": dropout,
        "target_modules": sorted(_targets(stored, adapted)),
        "bias": "none",
        "inference_mode": True,
    }
    metadata = {RECORD: json.dumps(base_values)}
    with folder_beside(folder, MODEL_KIND, overwrite=overwrite) as new_folder:
        write_json(new_folder / adapter.CONFIG, settings)
        write_safetensors(new_folder / adapter.WEIGHTS, tensors, metadata=metadata)
        for name, text in extra.items():
            (new_folder / name).write_text(text)


def _join_factors(stored: StoredTensor, factors: Factors, rank: int, joined: int) -> tuple[Tensor, Tensor]:
    """A (rank x joined, I) and B (O, rank x joined) of a stored module. Parts without factors are zero."""
    a, b = torch.zeros(rank * joined, stored.shape[1]), torch.zeros(stored.shape[0], rank * joined)
    ends = [sum(stored.lengths[:number]) for number in range(len(stored.lengths) + 1)]
    for number, part in enumerate(stored.parts):
        pair = factors.get(part.target.removesuffix(".weight"))
        if pair is not None:
            ranks = slice(number * rank, (number + 1) * rank)
            a[ranks], b[ends[number] : ends[number + 1], ranks] = pair
    return a, b


def _targets(stored: Mapping[str, StoredTensor], adapted: Mapping[str, StoredTensor]) -> Iterator[str]:
    """The modules' last names, as PEFT matches them; full names where a module without adapter has the same last
    name."""
    modules = [name.removesuffix(".weight") for name in stored if name.endswith(".weight")]
    for leaf in {module.rpartition(".")[2] for module in adapted}:
        namesakes = [module for module in modules if module.rpartition(".")[2] == leaf]
        yield from (
            [leaf] if all(module in adapted for module in namesakes) else filter(adapted.__contains__, namesakes)
        )
