"""Checkpoints name and group their tensors as their families' authors do."""

from pathlib import Path

import torch
from family_models import FAMILIES, random_model
from safetensors.torch import load_file

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model


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
