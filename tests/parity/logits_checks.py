"""Logits of every family's fixtures against one dense forward, and the exact round trip of its checkpoint.

Shape legend: L positions, E experts, K chosen experts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.models.mlp import Router
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
    positions = torch.tensor([inputs.get("position_ids", list(range(tokens.shape[1])))])
    model = load_model(folder)
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for index, layer in enumerate(model.model.layers):
        router = getattr(layer.mlp, "gate", None)
        if router is not None:
            router.register_forward_hook(_recorder(seen, index))
    with torch.no_grad():
        logits = model.logits(model(tokens, positions, DenseAttention(_mask(inputs, positions, expected, name))))[0]
    torch.testing.assert_close(logits, expected[name], atol=LOGITS_ATOL, rtol=0)
    extras = set(case["tensors"]) - {name, f"{name}.mask"}
    assert extras == {f"{name}.{kind}_layer{index}" for index in seen for kind in ("router_logits", "topk_experts")}
    for index, (scores_LE, ids_LK) in seen.items():
        wanted_LE, chosen_LK = (expected[f"{name}.{kind}_layer{index}"] for kind in ("router_logits", "topk_experts"))
        torch.testing.assert_close(scores_LE, wanted_LE, atol=LOGITS_ATOL, rtol=0)
        assert torch.equal(ids_LK.sort(-1).values, chosen_LK.sort(-1).values)


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
    if inputs["attention"] == "full":
        return torch.ones(1, 1, positions.shape[1], positions.shape[1], dtype=torch.bool)
    blocks = positions[0] // int(inputs["attention"].removeprefix("block_causal block="))
    return (blocks[None, :] <= blocks[:, None])[None, None]


def _recorder(seen: dict[int, tuple[Tensor, Tensor]], index: int) -> Callable[..., None]:
    def record(router: Router, args: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        seen[index] = (router.logits(args[0]), output[0])

    return record


CHECKS: dict[tuple[str, str], Callable[[Path, dict[str, Any]], None]] = {
    (family, "logits"): check_logits for family in ("sdar", "llada2", "llada", "dream", "fastdllm2")
}
