"""An adapter knows its base by values of its weights: a copy is the same base, other weights are another one."""

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import CONFIGS, write_model
from safetensors.torch import load_file, save_file

from jobs.convert_checkpoint import main
from mbd_core.checkpoint.adapter_saving import save_adapter
from mbd_core.checkpoint.base_values import base_values, check_base
from mbd_core.engine.config import EngineConfig
from mbd_core.models.model_config import ModelConfig
from mbd_core.serving.server.engine_service import EngineService
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.load import load_engine

DENSE = ("sdar", "dream", "llada")


def write_adapter(folder: Path, config: ModelConfig, base: Path) -> Path:
    size = config.num_heads * config.head_dim
    factors = {"model.layers.0.self_attn.q_proj": (torch.ones(2, config.hidden_size), torch.ones(size, 2))}
    settings = {"rank": 2, "alpha": 2, "dropout": 0.0, "extra": {}}
    save_adapter(folder, config, factors, base="the-base", base_values=base_values(base), **settings)
    return folder


def changed(base: Path, folder: Path, scale: float) -> Path:
    """The base, trained further: every matrix of its layers is changed."""
    shutil.copytree(base, folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            tensors[name] = (tensor.float() + scale * noise).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_other_weights_of_equal_shapes_are_another_base(tmp_path: Path, name: str) -> None:
    base = write_model(tmp_path / "base", CONFIGS[name])
    values = base_values(base)
    assert values and all(0 < len(row) <= 64 for row in values.values())
    if name not in DENSE:
        return
    adapter, other = write_adapter(tmp_path / "a", CONFIGS[name], base), changed(base, tmp_path / "other", 0.05)
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in adapter.iterdir()), "a server of another user reads it"
    check_base(adapter, base)
    with pytest.raises(ValueError, match=r"/a was trained beside the-base, .* /.*/other; give the adapter its own"):
        check_base(adapter, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_in_another_precision_or_other_shards_is_the_same_base(tmp_path: Path, dtype: torch.dtype) -> None:
    base = changed(write_model(tmp_path / "first", CONFIGS["sdar"]), tmp_path / "base", 0.1)
    tensors = {name: tensor.float() * 1.001 for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = write_adapter(tmp_path / "a", CONFIGS["sdar"], base)
    copy = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(base, copy)
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        copy / "model.safetensors",
        metadata={"format": "pt"},
    )
    check_base(adapter, copy)
    assert main([str(copy), "--out", str(tmp_path / "sharded"), "--adapter", str(adapter)]) == 0


async def arranged(model: Path, adapter: Path) -> None:
    engine = EngineConfig(max_rows=1, num_pages=16, max_adapters=1)
    service = EngineService(EndpointArgs(model=str(model), name="tiny", engine=engine))
    try:
        await service.arrange(weights=None, adapters={"a": str(adapter)})
    finally:
        await service.stop()


def test_an_adapter_is_not_loaded_or_merged_beside_another_base(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from asyncio import run

    from mbd_core.checkpoint.config import load_config

    adapter = write_adapter(tmp_path / "a", load_config(tiny_model_dir), tiny_model_dir)
    other = changed(tiny_model_dir, tmp_path / "other", 0.1)
    engine = EngineConfig(max_rows=1, num_pages=16, max_adapters=1)
    load_engine(tiny_model_dir, engine, adapters={"a": adapter}).engine.close()
    run(arranged(tiny_model_dir, adapter))
    for load in (lambda: load_engine(other, engine, adapters={"a": adapter}), lambda: run(arranged(other, adapter))):
        with pytest.raises(ValueError, match="was trained beside the-base"):
            load()
    assert main([str(other), "--adapter", str(adapter), "--out", str(tmp_path / "made")]) == 2
    said = capsys.readouterr().err
    assert "was trained beside the-base" in said and said.count("\n") == 1 and not (tmp_path / "made").exists()
