"""A trained adapter as a shipped one, also at a lower rank than it was trained at."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import write_adapter
from safetensors.torch import load_file
from small_engines import build

from research.real.ship import at_rank, main

STATES = {"states": {"block_size": 8}, "generation": {}}
RECIPE = {"data": {"path": "a/path", "digest": "0"}, "train": {"lora": {"start": "out/bd"}}, **STATES}


def test_a_lower_rank_is_the_nearest_product() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {"x.lora_A.weight": torch.randn(6, 20, generator=generator), "x.lora_B.weight": torch.randn(30, 6)}
    u, sizes, v = torch.linalg.svd(tensors["x.lora_B.weight"] @ tensors["x.lora_A.weight"], full_matrices=False)
    for rank in (1, 4):
        found = at_rank(tensors, rank)
        assert found["x.lora_A.weight"].shape == (rank, 20) and found["x.lora_B.weight"].shape == (30, rank)
        torch.testing.assert_close(
            found["x.lora_B.weight"] @ found["x.lora_A.weight"],
            u[:, :rank] * sizes[:rank] @ v[:rank],
            rtol=0,
            atol=1e-3,
        )


def test_a_shipped_adapter_says_its_own_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scaled by alpha / rank, it changes the model as much as before."""
    adapter = write_adapter(tmp_path / "adapter", build().config, seed=1, rank=4)
    recipe = {"data": {"path": "a/path", "digest": "0"}, "train": {"lora": {}}, **STATES}
    (adapter / "recipe.json").write_text(json.dumps(recipe))
    trained = json.loads((adapter / "adapter_config.json").read_text())
    argv = ["--adapter", str(adapter), "--base", "smollm2-135m", "--about", "x", "--out", str(tmp_path / "out")]
    assert main([*argv, "--name", "small", "--rank", "2"]) == 0
    shipped = json.loads((tmp_path / "out" / "small" / "adapter_config.json").read_text())
    assert (shipped["r"], shipped["lora_alpha"] / 2) == (2, trained["lora_alpha"] / 4)
    tensors = load_file(tmp_path / "out" / "small" / "adapter_model.safetensors")
    assert {min(tensor.shape) for tensor in tensors.values()} == {2}
    assert main([*argv, "--name", "none", "--rank", "4"]) == 2
    assert "--rank 4 must be below the adapter's own, 4" in capsys.readouterr().err
    assert not (tmp_path / "out" / "none").exists()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"--base": "typo"}, "unknown --base typo; known: smollm2-135m, "),
        ({"--name": "../x"}, "--name ../x must be a name alone"),
        ({"--name": "smollm2-135m"}, "--name smollm2-135m is the base itself"),
        ({"--name": "smollm2-bd", "--base": "smollm2-mbd"}, "--name smollm2-bd is the base itself, or below it"),
        ({"adapter_config.json": {"r": None}}, "r=None must be a whole number"),
        ({"adapter_config.json": "{"}, "adapter_config.json is not valid JSON"),
        ({"recipe.json": "{"}, "recipe.json is not valid JSON"),
        ({"recipe.json": {**RECIPE, "states": None}}, "recipe.json is cut or damaged"),
        ({"recipe.json": {**RECIPE, "data": None}}, "recipe.json says no data"),
        ({"recipe.json": {**RECIPE, "train": {"lora": None}}}, "recipe.json says no train.lora"),
        ({"recipe.json": None}, "holds no recipe.json"),
        ({"adapter_model.safetensors": "cut"}, "adapter_model.safetensors is damaged"),
        ({"adapter_model.safetensors": None}, "adapter_model.safetensors cannot be read"),
    ],
)
def test_what_cannot_be_shipped_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], fault: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", build().config, seed=1, rank=4)
    (adapter / "recipe.json").write_text(json.dumps(RECIPE))
    options = {"--base": "smollm2-135m", "--name": "small", "--out": str(tmp_path / "out")}
    for name, change in changes.items():
        if name in options:
            options[name] = change
        elif change is None:
            (adapter / name).unlink()
        elif name == "adapter_config.json" and not isinstance(change, str):
            (adapter / name).write_text(json.dumps(json.loads((adapter / name).read_text()) | change))
        else:
            (adapter / name).write_text(change if isinstance(change, str) else json.dumps(change))
    argv = [text for option in options.items() for text in option]
    assert main(["--adapter", str(adapter), "--about", "x", "--rank", "2", *argv]) == 2
    assert fault in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [adapter]
