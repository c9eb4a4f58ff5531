"""Tensors that do not match config.json are named."""

from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, random_model, rewrite
from safetensors.torch import load_file, save_file

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.model_config import ModelConfig


def test_wrong_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a model folder: it has no config.json"):
        load_model(tmp_path)
    weights = load_file(folder / "model.safetensors")

    def with_tensors(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_model(folder)

    name = "model.layers.1.mlp.up_proj.weight"
    with_tensors({k: v for k, v in weights.items() if k != name}, f"lacks the tensor '{name}', which")
    with_tensors(weights | {"surprise": torch.zeros(1)}, "unexpected tensor 'surprise'")
    with_tensors(weights | {name: torch.zeros(3, 3)}, rf"'{name}' has shape \(3, 3\)")
    save_file(weights, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or cut short at tensor 'model"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks the weights file model.safetensors"):
        load_model(folder)


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_wrong_vocabularies_are_named(tmp_path: Path, config: ModelConfig) -> None:
    save_model(tmp_path / "m", random_model(config))
    rewrite(tmp_path / "m" / "config.json", vocab_size=320, embedding_size=None)
    with pytest.raises(
        ValueError, match=r"model.safetensors: tensor '\S+' has 300 rows, config.json says vocab_size=320"
    ):
        load_model(tmp_path / "m")
