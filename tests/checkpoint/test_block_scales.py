"""FP8 weights with a scale for each block: read as what they stand for, whole, by rank, and by the converter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import CONFIGS, rounded_folder, write_model
from safetensors.torch import load_file, save_file

from mbd_core.checkpoint import safetensor_files
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.safetensor_files import WEIGHTS, list_tensors
from mbd_core.models.shard import Shard


def test_a_file_of_scales_is_opened_once_for_all_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded_folder(tmp_path / "model", "sdar", apart=True)
    opened, open_file = list[str](), safetensor_files.open_file

    def counted(path: Path) -> Any:
        opened.append(path.name)
        return open_file(path)

    monkeypatch.setattr(safetensor_files, "open_file", counted)
    load_model(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "converted")
    assert opened.count("second.safetensors") <= 4, "each lists the tensors and reads the scales"


@pytest.mark.parametrize("name", ["llada2", "sdar-moe", "sdar"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_model_is_loaded_as_what_its_files_stand_for(tmp_path: Path, name: str, apart: bool) -> None:
    meaning = rounded_folder(tmp_path / "fp8", name, apart=apart)
    plain = write_model(tmp_path / "plain", CONFIGS[name])
    save_file(meaning, plain / WEIGHTS)
    found, expected = (load_model(tmp_path / kind, dtype=torch.float32).state_dict() for kind in ("fp8", "plain"))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert load_model(tmp_path / "fp8").lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llada2", "sdar"])
def test_a_rank_s_part_is_that_of_the_whole_model(tmp_path: Path, name: str) -> None:
    """A rank's rows and columns begin within a block."""
    meaning = rounded_folder(tmp_path / "fp8", name)
    plain = write_model(tmp_path / "plain", CONFIGS[name])
    save_file(meaning, plain / WEIGHTS)
    for rank in (0, 1):
        shard = Shard(rank=rank, size=2)
        parts = [
            load_model(tmp_path / kind, dtype=torch.float32, shard=shard, reduce=lambda x: x).state_dict()
            for kind in ("fp8", "plain")
        ]
        assert all(torch.equal(parts[0][key], tensor) for key, tensor in parts[1].items())


def test_a_converted_folder_holds_bfloat16_and_says_nothing_of_fp8(tmp_path: Path) -> None:
    meaning = rounded_folder(tmp_path / "fp8", "llada2", apart=True)
    convert(tmp_path / "fp8", tmp_path / "wide", to="hf")
    assert "quantization_config" not in json.loads((tmp_path / "wide" / "config.json").read_text())
    written = load_file(tmp_path / "wide" / WEIGHTS)
    assert written.keys() == meaning.keys()
    for name, tensor in meaning.items():
        assert torch.equal(written[name].float(), tensor.to(written[name].dtype).float()), name


def test_scales_that_are_missing_or_do_not_fit_are_named(tmp_path: Path) -> None:
    rounded_folder(tmp_path / "fp8", "sdar")
    tensors = load_file(tmp_path / "fp8" / WEIGHTS)
    scale = next(name for name in tensors if name.endswith("_scale_inv"))
    save_file(tensors | {scale: tensors[scale][:-1].clone()}, tmp_path / "fp8" / WEIGHTS)
    with pytest.raises(ValueError, match=f"'{scale}' has shape"):
        list_tensors(tmp_path / "fp8")
    save_file({name: t for name, t in tensors.items() if name != scale}, tmp_path / "fp8" / WEIGHTS)
    with pytest.raises(ValueError, match=f"lacks .*'{scale}'"):
        list_tensors(tmp_path / "fp8")


def test_fp8_weights_without_a_word_in_the_configuration_are_refused(tmp_path: Path) -> None:
    rounded_folder(tmp_path / "fp8", "sdar")
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantization_config"):
        load_model(tmp_path / "fp8")
