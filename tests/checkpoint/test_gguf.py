"""GGUF files as models: the network that transformers wrote, under any command; and files that are refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from base_folders import base_folder
from gguf_file import write_gguf

from jobs.convert_checkpoint import main
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.models.shapes import SHAPES
from mbd_core.ops.attention.whole import DenseAttention

pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("kind", "shape", "architecture", "name", "changes"),
    [
        ("Llama", "tiny-llama", "llama", "tiny", {"tie_word_embeddings": True}),
        ("Mistral", "tiny-llama", "llama", "Mistral 7B", {"sliding_window": None}),
        ("Qwen2", "tiny-qwen2", "qwen2", "tiny", {}),
        ("Qwen3", "tiny-qwen3", "qwen3", "tiny", {"head_dim": 16}),
    ],
)
@torch.inference_mode()
def test_a_gguf_is_the_model_that_it_was_made_of(
    tmp_path: Path, kind: str, shape: str, architecture: str, name: str, changes: dict[str, Any]
) -> None:
    base = base_folder(tmp_path / "base", kind, shape, **changes)
    (tmp_path / "quantised").mkdir()
    file = write_gguf(tmp_path / "quantised" / "model.gguf", base, architecture, name=name)
    folder = model_folder(str(file))
    assert model_folder(str(file.parent)) == folder and folder.is_relative_to(tmp_path / "cache")
    read, before = read_folder(folder), read_folder(base)
    assert read.config.architecture == f"{'Llama' if kind == 'Mistral' else kind}ForCausalLM"
    assert read.config.prefix_methods == ("ar",)
    assert read.tokenizer.chat_template == before.tokenizer.chat_template
    text = "1+1=2, and a word"
    assert read.tokenizer(text).input_ids == before.tokenizer(text).input_ids
    ids_T = torch.randint(3, SHAPES[shape].vocab_size, (24,), generator=torch.Generator().manual_seed(1))
    causal = DenseAttention(torch.ones(1, 1, 24, 24, dtype=torch.bool).tril())
    model = load_model(folder)
    logits = model.logits(model(ids_T[None], torch.arange(24)[None], causal)[0])
    theirs = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(base).eval()
    torch.testing.assert_close(logits, theirs(ids_T[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_a_gguf_is_converted_to_a_folder(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", base_folder(tmp_path / "base", "Qwen2", "tiny-qwen2"), "qwen2")
    assert main([str(file), "--out", str(tmp_path / "made")]) == 0
    made, before = load_model(tmp_path / "made").state_dict(), load_model(model_folder(str(file))).state_dict()
    assert all(torch.equal(made[name], before[name]) for name in before)


def test_quantised_weights_become_bfloat16(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "Llama", "tiny-llama", intermediate_size=64)
    folder = model_folder(str(write_gguf(tmp_path / "model.gguf", base, "llama", q8=True)))
    assert read_folder(folder).stored_dtype == torch.bfloat16
    ours, theirs = load_model(folder).state_dict(), load_model(base).state_dict()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name].float(), tensor, rtol=0.02, atol=0.02)


def refusal(model: Path) -> str:
    with pytest.raises(ValueError) as refused:
        model_folder(str(model))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_folder(tmp_path / "base", "Qwen2", "tiny-qwen2")
    (tmp_path / "files").mkdir()
    file = write_gguf(tmp_path / "files" / "model.gguf", base, "qwen2")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "damaged" in refusal(cut)
    cut.write_bytes(b"not a GGUF at all, but some text")
    assert "damaged" in refusal(cut)
    changed = tmp_path / "changed.gguf"
    for changes, sentence in (
        ({"dropped": "blk.1.ffn_up.weight"}, "lacks the tensor blk.1.ffn_up.weight; download"),
        ({"more": {"blk.0.attn_output.bias": torch.zeros(32)}}, "has the tensor blk.0.attn_output.bias, for which"),
        ({"fields": {"split.count": 2}}, "is one of the 2 parts of a model; join them first"),
        ({"fields": {"qwen2.rope.dimension_count": 4}}, "rotates a part of each head"),
    ):
        assert sentence in refusal(write_gguf(changed, base, "qwen2", **changes))
        changed.unlink()
    assert "'gemma2'; known: llama" in refusal(write_gguf(tmp_path / "other.gguf", base, "gemma2"))
    write_gguf(tmp_path / "files" / "more.gguf", base, "qwen2")
    assert "name one of them: model.gguf, more.gguf" in refusal(tmp_path / "files")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'mbd-cluster[gguf]'" in refusal(file)
    assert not list((tmp_path / "cache").rglob("config.json"))
