"""Damaged and contradictory weights files are named in one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_models import rewrite
from safetensors.torch import load_file, save_file

from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.safetensor_files import INDEX, write_safetensors
from mbd_core.checkpoint.saving import save_model


def test_wrong_shards_are_named(folder: Path) -> None:
    save_model(folder, load_model(folder), max_shard_bytes=20_000, overwrite=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.norm.weight"]
    shard = load_file(folder / file)
    save_file(shard | {"lm_head.weight": torch.zeros(300, 16)}, folder / file)
    with pytest.raises(ValueError, match=r"lm_head.weight"):
        load_model(folder)
    save_file({n: t for n, t in shard.items() if n != "model.norm.weight"}, folder / file)
    with pytest.raises(ValueError, match=r"model.norm.weight"):
        load_model(folder)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=" more"):
        load_model(folder)


def test_a_write_that_fails_is_one_sentence(tmp_path: Path) -> None:
    """On a full disk too safetensors raises an error of its own."""
    with pytest.raises(OSError, match=r"a.safetensors cannot be written: ") as raised:
        write_safetensors(tmp_path / "absent" / "a.safetensors", {"a": torch.zeros(9)})
    assert "\n" not in str(raised.value)


def change_index(folder: Path, **files: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    rewrite(folder / INDEX, weight_map=index["weight_map"] | files)


def first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def cast(folder: Path, dtype: torch.dtype) -> None:
    weights = load_file(first(folder))
    save_file(weights | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"].to(dtype)}, first(folder))


def be_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_of_bin_files(folder: Path) -> None:
    (folder / INDEX).unlink()
    for number, file in enumerate(folder.glob("*.safetensors")):
        file.rename(folder / f"pytorch_model-{number}.bin")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda f: (f / INDEX).unlink(), "lacks the weights file model.safetensors, and model.safeten"),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), "index.json has no weight_map"),
    "index is a list": (lambda f: (f / INDEX).write_text("[]"), "index.json holds a list, not a JSON object"),
    "index with a number": (lambda f: change_index(f, x=5), "index.json has the tensor 'x' in 5, which is no file"),
    "index leads away": (lambda f: change_index(f, x="../x"), "has the tensor 'x' in '../x', which is no file"),
    "index with a lost file": (lambda f: change_index(f, x="y.safetensors"), "lacks the weights file y.safetensors"),
    "a whole file too": (
        lambda f: shutil.copy(first(f), f / "model.safetensors"),
        "has weights twice, in model.safetensors and by model.safetensors.index.json in model-00001-of-.*; remove",
    ),
    "index with a lost tensor": (lambda f: change_index(f, x=first(f).name), "00001-of-.* lacks the tensor 'x'"),
    "empty file": (lambda f: first(f).write_bytes(b""), "00001-of-.* is damaged or cut short in its header"),
    "pointer": (lambda f: first(f).write_text("version https://git-lfs.github.com/spec/v1\n"), "with: git lfs pull"),
    "other files": (be_of_bin_files, "lacks the weights file model.safetensors; its .bin files are not read: save"),
    "cut header": (lambda f: first(f).write_bytes(first(f).read_bytes()[:40]), "00001-of-.* in its header"),
    "odd header": (lambda f: first(f).write_bytes(b"\x08" + bytes(7) + b'{"a": 1}'), "00001-of-.* in its header"),
    "longer file": (lambda f: first(f).write_bytes(first(f).read_bytes() + b"x"), "00001-of-.* is damaged"),
    "folder for a file": (lambda f: be_a_folder(first(f)), "00001-of-.* cannot be read: Is a directory"),
    "whole numbers": (lambda f: cast(f, torch.int8), "00001-of-.*: tensor 'model.embed_.*' has dtype I8; known: "),
    "config is a folder": (lambda f: be_a_folder(f / "config.json"), "config.json cannot be read: Is a directory"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json holds a list"),
    "config is no text": (lambda f: (f / "config.json").write_bytes(b"\xff"), "config.json is not UTF-8"),
    "generation is no JSON": (lambda f: (f / "generation_config.json").write_text("{"), "^[^:]*/generation_config.j"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_one_sentence(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    save_model(folder, load_model(folder), max_shard_bytes=20_000, overwrite=True)
    load_model(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def respell(folder: Path, spell: Callable[[str], str]) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({spell(name): tensor for name, tensor in load_file(file).items()}, file)
    index = json.loads((folder / INDEX).read_text())
    rewrite(folder / INDEX, weight_map={spell(name): file for name, file in index["weight_map"].items()})


SPELLINGS: list[Callable[[str], str]] = [
    lambda name: f"_orig_mod.{name}",
    lambda name: f"module.{name}",
    lambda name: (
        f"_fsdp_wrapped_module.{name.replace('.mlp.', '._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.')}"
    ),
]


@pytest.mark.parametrize("spell", SPELLINGS)
def test_names_of_wrappers_are_read_and_converted(folder: Path, tmp_path: Path, spell: Callable[[str], str]) -> None:
    """A model that was saved from within torch.compile, DDP or FSDP."""
    wanted = load_model(folder).state_dict()
    save_model(folder, load_model(folder), max_shard_bytes=20_000, overwrite=True)
    respell(folder, spell)
    convert(folder, tmp_path / "plain")
    for source in (folder, tmp_path / "plain"):
        found = load_model(source).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert set(load_file(first(tmp_path / "plain"))) == set(wanted)


def test_names_that_mean_one_tensor_or_several_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"_orig_mod.lm_head.weight": torch.zeros(300, 16)}, path)
    with pytest.raises(ValueError, match="keep one"):
        load_model(folder)
    save_file(weights | {"_fsdp_wrapped_module._flat_param": torch.zeros(9)}, path)
    with pytest.raises(ValueError, match="save the model's"):
        load_model(folder)
