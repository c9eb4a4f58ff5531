"""Distributed checkpoints: written file by file, read from and by a trainer."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_folders import LLADA2, SDAR_MOE, contents, write_model
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from jobs.convert_checkpoint import main
from mbd_core.checkpoint import conversion
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.dcp import save_dcp
from mbd_core.checkpoint.loading import load_model


def test_dcp_has_about_as_many_files_as_there_are_shards(tmp_path: Path) -> None:
    """Many tensors in a few files, none larger than asked, and read by DCP's own reader."""
    start = write_model(tmp_path / "start", LLADA2, max_shard_bytes=8000)
    convert(start, tmp_path / "dcp", to="dcp", max_shard_bytes=8000)
    files = sorted((tmp_path / "dcp").glob("*.distcp"))
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    held = dict.fromkeys((f.name for f in files), 0)
    for index, where in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[index.fqn]
        held[where.relative_path] += tensor.size.numel() * tensor.properties.dtype.itemsize
    assert len(files) == len(list(start.glob("*.safetensors"))) > 2
    assert 0 < min(held.values()) <= max(held.values()) <= 8000
    assert len(metadata.state_dict_metadata) > 10 * len(files)
    stored = {name: t for file in start.glob("*.safetensors") for name, t in load_file(file).items()}
    state = {"model": {name: torch.zeros_like(t) for name, t in stored.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(t, state["model"][name]) for name, t in stored.items())


def test_dcp_makes_a_tensor_when_its_turn_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is made before the files in front of its own are closed."""
    start = write_model(tmp_path / "start", LLADA2)
    seen = []

    def watched(folder: Path, planned: dict[str, torch.Tensor], make, **options) -> None:
        def noted(name: str) -> torch.Tensor:
            seen.append(sum(p.stat().st_size for p in folder.glob("*.distcp")))
            return make(name)

        save_dcp(folder, planned, noted, **options)

    monkeypatch.setattr(conversion, "save_dcp", watched)
    convert(start, tmp_path / "dcp", to="dcp", max_shard_bytes=4000)
    assert seen == sorted(seen)
    assert len(set(seen)) >= len(list((tmp_path / "dcp").glob("*.distcp"))) > 5


def test_an_adapter_alone_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = write_model(tmp_path / "start", LLADA2)
    state = {"model": {"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 3)}}
    dcp.save(state, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert main([str(tmp_path / "step-7"), "--out", str(tmp_path / "to"), "--config", str(start)]) == 2
    assert "step-7 holds an adapter (LoRA) without its base; go on with its training" in capsys.readouterr().err


def test_trainers_checkpoint_becomes_a_model(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", LLADA2)
    model = load_model(start)
    state = {"model": model.state_dict(), "optimizer": {"momentum": torch.ones(3)}, "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "step-7", no_dist=True)
    options = {"--out": tmp_path / "hf", "--to": "hf", "--config": start}
    assert main([str(tmp_path / "step-7"), *(str(part) for option in options.items() for part in option)]) == 0
    assert contents(tmp_path / "hf") == contents(start)


def test_dcp_can_be_loaded_by_a_trainer(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", SDAR_MOE)
    convert(start, tmp_path / "dcp", experts="fused", to="dcp")
    model = load_model(start)
    state = {"model": {n: torch.zeros_like(t) for n, t in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(t, state["model"][n]) for n, t in model.state_dict().items())
