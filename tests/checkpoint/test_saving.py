"""Saved models come back bit for bit, from every family's folder; a folder that is there is safe."""

import json
from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, SDAR, SIZES, random_model
from safetensors.torch import load_file

from mbd_core.checkpoint.config import read_config, write_config
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model, save_random
from mbd_core.files import MANIFEST
from mbd_core.models.decoder import Decoder, init_weights
from mbd_core.models.model_config import ModelConfig


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path: Path, tied: bool) -> None:
    model = Decoder(ModelConfig(**(SIZES | {"tie_word_embeddings": tied, "eos_token_ids": (1, 2)})))
    init_weights(model, seed=0)
    save_model(tmp_path / "m", model)
    again = load_model(tmp_path / "m")
    assert again.config == model.config
    assert ("lm_head.weight" in load_file(tmp_path / "m" / "model.safetensors")) is not tied
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert sum(p.numel() for p in again.parameters()) == model.config.num_parameters


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("experts", ["per_expert", "fused"])
def test_every_family_comes_back_from_several_files(tmp_path: Path, config: ModelConfig, experts) -> None:
    model = random_model(config)
    save_model(tmp_path / "m", model, experts=experts, max_shard_bytes=9000)
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    again = load_model(tmp_path / "m")
    assert again.config == config == read_config(write_config(config))
    assert sum(p.numel() for p in again.parameters()) == config.num_parameters
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_unfinished_save_leaves_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args, **kwargs):
        raise OSError("disk full")

    before = (folder / "model.safetensors").read_bytes()
    model = load_model(folder)
    monkeypatch.setattr("mbd_core.checkpoint.safetensor_files.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_model(folder, model, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_weights_can_be_read_by_others(folder: Path) -> None:
    assert {path.stat().st_mode & 0o444 for path in folder.iterdir()} == {0o444}


def test_a_target_that_is_there_is_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    """A folder with files, a file, a link to nothing; nothing is written and nothing is lost."""
    model, whole = load_model(folder), {p.name: p.read_bytes() for p in folder.iterdir()}
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    there = sorted(p.name for p in tmp_path.iterdir())

    def refuse(*_: object) -> None:
        raise AssertionError("work has begun")

    def refused(target: Path, message: str, *, overwrite: bool) -> None:
        with pytest.raises(ValueError, match=message):
            save_model(target, model, overwrite=overwrite)
        with pytest.raises(ValueError, match=message):
            save_random(SDAR, target, overwrite=overwrite, progress=refuse)

    refused(folder, "model exists already and holds a model; give another folder, or --overwrite", overwrite=False)
    for overwrite in (False, True):
        refused(tmp_path / "file", "file exists already and is not a folder", overwrite=overwrite)
        refused(tmp_path / "link", "link exists already and is not a folder", overwrite=overwrite)
        refused(tmp_path / "foreign", "was not written by this project", overwrite=overwrite)
    (folder / "mine.txt").write_text("mine")
    refused(folder, r"cannot be replaced: mine.txt in it was not written by this project", overwrite=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole | {"mine.txt": b"mine"}
    assert sorted(p.name for p in tmp_path.iterdir()) == there
    assert (tmp_path / "foreign" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_overwrite_replaces_a_model_of_ours_and_an_empty_folder_is_filled(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder)
    save_model(folder, model, overwrite=True)
    assert not (folder / "tokenizer.json").exists()
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["kind"] == "model"
    assert {*manifest["files"], MANIFEST} == {p.name for p in folder.iterdir()}
    (tmp_path / "empty").mkdir()
    save_model(tmp_path / "empty", model)
    assert load_model(tmp_path / "empty").config == model.config
