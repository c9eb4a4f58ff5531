"""A trained adapter as a shipped one, also at a lower rank than it was trained at."""

import json
from pathlib import Path

import pytest
import torch
from adapter_folders import write_adapter
from safetensors.torch import load_file
from small_engines import build

from research.real.ship import at_rank, main


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
    recipe = {"data": {"path": "a/path", "digest": "0"}, "train": {"lora": {}}}
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
