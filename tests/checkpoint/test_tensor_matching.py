"""Tensors are named and grouped as the families' authors do; those that do not match config.json are refused."""

from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, SIZES, random_model, rewrite
from safetensors.torch import load_file, save_file

from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.model_config import ModelConfig


def test_wrong_folders_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config.json"):
        load_model(tmp_path)
    weights = load_file(folder / "model.safetensors")

    def with_tensors(tensors: dict[str, torch.Tensor], message: str) -> None:
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_model(folder)

    name = "model.layers.1.mlp.up_proj.weight"
    with_tensors({k: v for k, v in weights.items() if k != name}, f"lacks the tensor '{name}', which")
    with_tensors(weights | {"surprise": torch.zeros(1)}, "unexpected tensor 'surprise'")
    with_tensors(weights | {name: torch.zeros(3, 3)}, rf"'{name}' has shape \(3, 3\)")
    save_file(weights, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut short"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks .*model.safetensors"):
        load_model(folder)


def test_frequencies_of_a_rotation_are_no_weights(folder: Path) -> None:
    weights, model = load_file(folder / "model.safetensors"), load_model(folder)
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    assert all(torch.equal(load_model(folder).state_dict()[name], t) for name, t in model.state_dict().items())


def test_a_head_beside_tied_embeddings_must_have_their_values(tmp_path: Path) -> None:
    path = tmp_path / "m" / "model.safetensors"
    save_model(tmp_path / "m", random_model(ModelConfig(**(SIZES | {"tie_word_embeddings": True}))))
    weights = load_file(path)
    embeddings = weights["model.embed_tokens.weight"]
    for head in (embeddings, embeddings.bfloat16()):
        save_file(weights | {"lm_head.weight": head.clone()}, path)
        assert torch.equal(load_model(tmp_path / "m").lm_head.weight, embeddings)
    for head in (embeddings * 1.1, embeddings[:-1]):
        save_file(weights | {"lm_head.weight": head.clone()}, path)
        with pytest.raises(ValueError, match=r"'lm_head.weight' has other values than 'model.embed_.*make it false"):
            read_folder(tmp_path / "m")


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_wrong_vocabularies_are_named(tmp_path: Path, config: ModelConfig) -> None:
    save_model(tmp_path / "m", random_model(config))
    rewrite(tmp_path / "m" / "config.json", vocab_size=320, embedding_size=None)
    with pytest.raises(ValueError, match="vocab_size=320"):
        load_model(tmp_path / "m")


def test_families_call_their_tensors_what_their_authors_do(tmp_path: Path) -> None:
    found = {}
    for family, config in FAMILIES.items():
        save_model(tmp_path / family, random_model(config))
        found[family] = load_file(tmp_path / family / "model.safetensors")
    qkv = found["llada2"]["model.layers.1.attention.query_key_value.weight"]
    layer = load_model(tmp_path / "llada2").model.layers[1]
    assert torch.equal(qkv[:32], layer.self_attn.q_proj.weight)
    assert torch.equal(qkv[32:48], layer.self_attn.k_proj.weight)
    assert torch.equal(qkv[48:], layer.self_attn.v_proj.weight)
    assert torch.equal(found["llada2"]["model.layers.1.mlp.experts.5.up_proj.weight"], layer.mlp.experts.up_proj[5])
    assert {
        "model.word_embeddings.weight",
        "model.layers.1.mlp.gate.expert_bias",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.attention.dense.weight",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
    } <= found["llada2"].keys()
    assert {
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.3.down_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
    } <= found["sdar-moe"].keys()
    assert found["llada"]["model.transformer.ff_out.weight"].shape == (300, 16)
    assert found["llada"]["model.transformer.blocks.0.ff_out.weight"].shape == (16, 24)
    assert "model.layers.0.self_attn.q_proj.bias" in found["dream"]
    assert not any("norm" in n and "self_attn" in n for n in found["dream"])
