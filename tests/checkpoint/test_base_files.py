"""What a folder made from another one takes over of it, where that is not all: links, quantized weights, much data."""

import json
import re
from pathlib import Path

import pytest
from checkpoint_folders import rounded_folder

from mbd_core.checkpoint import base_files
from mbd_core.checkpoint.base_files import files_beside_weights, read_base
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    """To a file, to a folder, to nothing; a link to a file inside is the file."""
    (folder / "LICENSE").symlink_to(folder / "config.json")
    assert "LICENSE" in files_beside_weights(folder)
    (tmp_path / "secret").write_text("not the model's")
    for target in (tmp_path / "secret", tmp_path, tmp_path / "nowhere", folder):
        (folder / "notes").symlink_to(target)
        sentence = re.escape(f"{folder / 'notes'} is a link to no file in {folder}, and is not copied; put the file")
        with pytest.raises(ValueError, match=sentence):
            read_base(folder)
        with pytest.raises(ValueError, match=sentence):
            convert(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        (folder / "notes").unlink()


def test_a_snapshot_of_the_hub_cache_is_files(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        (blobs / f"sha-{path.name}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/sha-{path.name}")
    assert read_base(snapshot) == read_base(folder)
    convert(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert load_model(tmp_path / "out").config == load_model(folder).config


def test_much_data_beside_the_weights_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "corpus").mkdir()
    (folder / "corpus" / "rows.jsonl").write_text("x" * 50_000)
    held = sum(path.stat().st_size for path in files_beside_weights(folder).values())
    monkeypatch.setattr(base_files, "MOST_BYTES", held)
    assert "corpus/rows.jsonl" in read_base(folder).others
    monkeypatch.setattr(base_files, "MOST_BYTES", held - 1)
    with pytest.raises(ValueError, match=r"corpus/rows.jsonl"):
        read_base(folder)


def test_settings_of_quantized_weights_do_not_stay_with_those_that_are_not(tmp_path: Path) -> None:
    base = tmp_path / "base"
    rounded_folder(base, "llada2")
    (base / "hf_quant_config.json").write_text("{}")
    save_model(tmp_path / "saved", load_model(base), base=read_base(base))
    convert(base, tmp_path / "converted")
    for made in (tmp_path / "saved", tmp_path / "converted"):
        config = json.loads((made / "config.json").read_text())
        assert "quantization_config" not in config and config["dtype"] == "bfloat16"
        assert not (made / "hf_quant_config.json").exists() and (made / "notes.txt").exists()
        assert load_model(made).config == load_model(base).config


def test_the_dtype_is_that_of_the_weights(folder: Path, tmp_path: Path) -> None:
    """As the file names it, if it does; a file that says the truth stays byte for byte."""
    text = (folder / "config.json").read_text()
    for key in ("dtype", "torch_dtype"):
        (folder / "config.json").write_text(text.replace('"dtype": "float32"', f'"{key}":  "bfloat16"'))
        convert(folder, tmp_path / key)
        assert (tmp_path / key / "config.json").read_text() == text.replace('"dtype": ', f'"{key}":  ')
