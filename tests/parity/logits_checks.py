"""Logits of every family's fixtures against one dense forward, and the exact round trip of its checkpoint.

Shape legend: L positions, E experts, K chosen experts.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mbd_core.checkpoint.config import read_config
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.decoder import Decoder
from mbd_core.models.mlp import Router
from mbd_core.models.model_config import MoEConfig
from mbd_core.models.rope import rope_frequencies, rotary
from mbd_core.ops.attention.whole import DenseAttention

LOGITS_ATOL = 1e-3


def check_logits(folder: Path, case: dict[str, Any]) -> None:
    """Raw logits, and for a mixture of experts the routers' scores and choices."""
    inputs, name = case["inputs"], case["name"]
    expected = load_file(folder / "logits.safetensors")
    if "prefix" in inputs:
        check_block_logits(folder, inputs, expected[name])
        return
    tokens = torch.tensor([inputs["input_ids"]])
    listed = inputs.get("position_ids", "0..")  # a range, in words
    positions = torch.tensor([list(range(tokens.shape[1])) if isinstance(listed, str) else listed])
    model = load_model(folder)
    if inputs.get("config_override"):
        config = read_config(json.loads((folder / "config.json").read_text()) | inputs["config_override"])
        model, state = Decoder(config), model.state_dict()
        model.load_state_dict(state)
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for index, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "gate", None)
        if router is not None:
            router.register_forward_hook(_recorder(seen, index))
    with torch.no_grad():
        logits = model.logits(model(tokens, positions, DenseAttention(_mask(inputs, positions, expected, name))))[0]
    torch.testing.assert_close(logits, expected[name], atol=LOGITS_ATOL, rtol=0)
    extras = set(case["tensors"]) - {name, f"{name}.mask"}
    weights = {f"{name}.topk_weights_layer{index}" for index in seen}
    kinds = ("router_logits", "topk_experts")
    assert extras - weights == {f"{name}.{kind}_layer{index}" for index in seen for kind in kinds}
    for index, (scores_LE, ids_LK, weights_LK) in seen.items():
        wanted_LE, chosen_LK = (expected[f"{name}.{kind}_layer{index}"] for kind in ("router_logits", "topk_experts"))
        torch.testing.assert_close(scores_LE, wanted_LE, atol=LOGITS_ATOL, rtol=0)
        assert torch.equal(ids_LK.sort(-1).values, chosen_LK.sort(-1).values)
        if extras & weights:
            torch.testing.assert_close(weights_LK, expected[f"{name}.topk_weights_layer{index}"])


def check_route(folder: Path, case: dict[str, Any]) -> None:
    """The choice for whole blocks alone: which experts a block keeps, each token's among them, and their weights."""
    inputs, wanted, name = case["inputs"], case["expected"], case["name"]
    tensors = load_file(folder / "logits.safetensors")
    config = MoEConfig(
        num_experts=inputs["num_experts"],
        experts_per_token=inputs["top_k"],
        intermediate_size=1,
        score="sigmoid",
        norm_topk_prob=True,
        expert_bias=True,
        routed_scaling=inputs["routed_scaling_factor"],
        expert_capacity=inputs["expert_capacity"],
    )
    router = Router(config.num_experts, config, block_size=inputs["block_size"])
    router.load_state_dict({"weight": torch.eye(config.num_experts), "expert_bias": tensors[f"{name}.expert_bias"]})
    logits_TE = tensors[f"{name}.router_logits"]
    if "raises" in wanted:
        with pytest.raises(ValueError, match="whole number of blocks"):
            router(logits_TE)
        return
    ids_TK, weights_TK = router(logits_TE)
    assert ids_TK.tolist() == wanted["topk_ids"]
    torch.testing.assert_close(weights_TK, tensors[name])
    for ids, allowed in zip(ids_TK.split(inputs["block_size"]), wanted["allowed"], strict=True):
        assert set(ids.flatten().tolist()) <= set(allowed)


def check_block_logits(folder: Path, inputs: dict[str, Any], expected_BV: Tensor) -> None:
    """A block behind a stored prefix; the case's other tensors are of stale keys, which this project does not keep."""
    ids = torch.tensor([*inputs["prefix"], *inputs["block"]])
    positions = torch.arange(len(ids))
    blocks = positions // inputs["block_size"]
    attention = DenseAttention((blocks[None, :] <= blocks[:, None])[None, None])
    model = load_model(folder)
    with torch.no_grad():
        logits = model.logits(model(ids[None], positions[None], attention))[0, len(inputs["prefix"]) :]
    torch.testing.assert_close(logits, expected_BV, atol=LOGITS_ATOL, rtol=0)


def check_two_orders(folder: Path, case: dict[str, Any]) -> None:
    """Tokens behind a prefix, each of the two in causal order or without one."""
    inputs, name = case["inputs"], case["name"]
    prefix, ids = inputs["prefix_ids"], inputs["prefix_ids"] + inputs["input_ids"]
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool)
    if inputs["attention"] == "causal":
        mask.tril_()
    mask[: len(prefix), len(prefix) :] = False
    if inputs["prefix_attention"] == "causal":
        mask[: len(prefix), : len(prefix)].tril_()
    model, positions = load_model(folder), torch.arange(len(ids))
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), positions[None], DenseAttention(mask[None, None]))
        logits = model.logits(hidden)[0, len(prefix) :]
    wanted = load_file(folder / "logits.safetensors")[name]
    torch.testing.assert_close(logits, wanted, atol=LOGITS_ATOL, rtol=0)


def check_rope(folder: Path, case: dict[str, Any]) -> None:
    """Rotary frequencies, and what queries are multiplied by at each position."""
    config, wanted = load_model(folder).config, load_file(folder / "logits.safetensors")
    frequencies, factor = rope_frequencies(config)
    torch.testing.assert_close(frequencies, wanted["rope"])
    assert factor == case["expected"]["attention_factor"]
    scale = rotary(torch.arange(case["inputs"]["positions"]), config).query_scale
    assert scale is not None
    torch.testing.assert_close(scale.flatten(), wanted["rope.query_scale"])


def check_round_trip(folder: Path, tmp_path: Path) -> None:
    """Loaded and saved again, a checkpoint has the same names, dtypes and values, and its config says the same."""
    save_model(tmp_path / "copy", load_model(folder))
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    assert load_model(tmp_path / "copy").config == load_model(folder).config


def _mask(inputs: dict[str, Any], positions: Tensor, expected: dict[str, Tensor], name: str) -> Tensor:
    """Who may attend to whom, (1, 1, L, L): the stored mask, else everybody, else the blocks up to one's own."""
    if f"{name}.mask" in expected:
        return expected[f"{name}.mask"].bool()[None, None]
    size = inputs.get("attention_block")
    attention = inputs.get("attention") or (f"block_causal block={size}" if size else "full")
    if attention == "full":
        return torch.ones(1, 1, positions.shape[1], positions.shape[1], dtype=torch.bool)
    blocks = positions[0] // int(attention.removeprefix("block_causal block="))
    return (blocks[None, :] <= blocks[:, None])[None, None]


def _recorder(seen: dict[int, tuple[Tensor, Tensor, Tensor]], index: int) -> Callable[..., None]:
    def record(router: Router, args: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        seen[index] = (router.logits(args[0]), *output)

    return record


CHECKS: dict[tuple[str, str], Callable[[Path, dict[str, Any]], None]] = {
    (family, "logits"): check_logits for family in ("sdar", "llada2", "llada22", "llada", "dream", "fastdllm2")
} | {
    ("llada22", "route"): check_route,
    ("nemotron", "logits"): check_two_orders,
    ("nemotron", "rope"): check_rope,
}
