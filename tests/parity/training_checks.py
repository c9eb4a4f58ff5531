"""MultiTF's layouts, masks, noise and losses."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import checkpoint_tensors
from mbd_core.multitf.layout import GroupLayout, systematic_layouts
from mbd_core.multitf.loss import multitf_loss
from mbd_core.multitf.mask import dual_stream_mask
from mbd_core.multitf.noise import SCHEDULES, NoiseBounds, num_masked
from mbd_core.multitf.sample import (
    IGNORE,
    Example,
    MultiTFBatch,
    NoisyStream,
    StateConfig,
    Weighting,
    collate,
    lay_out,
)
from mbd_core.ops.attention_dense import DenseAttention


def check_systematic_layouts(folder: Path, case: dict[str, Any]) -> None:
    for key, layouts in case["expected"]["layouts"].items():
        blocks, group = (int(part[1:]) for part in key.split("_"))
        assert [list(lay.sizes) for lay in systematic_layouts(blocks, group)] == layouts


def check_mask(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    if "layout" in inputs:
        layout, size = GroupLayout(tuple(inputs["layout"])), inputs["block_size"]
    elif case["name"].startswith("mask_bd3lm"):
        size = inputs["block_size"]
        layout = GroupLayout((1,) * (inputs["n"] // size))
    else:
        pytest.skip("this project does not train under D2F's prompt-full mask")
    blocks = torch.arange(layout.num_blocks).repeat_interleave(size)
    alpha = torch.tensor(layout.first_blocks()).repeat_interleave(size)
    mask = dual_stream_mask(
        torch.cat((torch.ones_like(blocks), torch.zeros_like(blocks))),
        torch.cat((blocks, blocks)),
        torch.cat((alpha, blocks + 1)),
    )
    assert torch.equal(mask, load_file(folder / "logits.safetensors")[case["name"]].bool())


def check_masked_count(folder: Path, case: dict[str, Any]) -> None:
    for maskable, ratio, count, _ in case["expected"]["rows"]:
        assert num_masked(ratio, maskable, "floor") == count


def stored_batch(inputs: dict[str, Any], weighting: Weighting) -> MultiTFBatch:
    """The case's one training sequence: its noisy stream under its layout, before its clean stream."""
    size, layout = inputs["block_size"], GroupLayout(tuple(inputs["layout"]))
    example = Example(tuple(inputs["clean"]), inputs["prompt_length"])
    noisy = NoisyStream(
        tokens=inputs["noisy"],
        masked=[label != IGNORE for label in inputs["labels"]],
        ratio=[t for t in inputs.get("t_per_block", [1.0] * inputs["K"]) for _ in range(size)],
    )
    config = StateConfig(block_size=size, max_group=max(layout.sizes), weighting=weighting)
    batch = collate([lay_out(example, [(layout, noisy)], config, first_block=0)])
    assert batch.labels[0, : len(inputs["labels"])].tolist() == inputs["labels"]
    return batch


def check_block_ratio_loss(folder: Path, case: dict[str, Any]) -> None:
    """Eq. B.13 over all K blocks; the reference's own self-normalised loss is another one."""
    inputs = case["inputs"]
    with torch.no_grad():
        loss, _ = multitf_loss(load_model(folder / inputs["checkpoint"]), stored_batch(inputs, "block_ratio"))
    assert float(loss) == pytest.approx(case["expected"]["paper_B13_over_all_K_blocks"], rel=1e-4)


def check_masked_mean_loss(folder: Path, case: dict[str, Any]) -> None:
    """Eq. B.11 on a mixture of experts: mask, logits of the noisy stream, loss, and the gradient of every weight."""
    inputs, expected = case["inputs"], case["expected"]
    stored = load_file(folder / "logits.safetensors")
    batch, length = stored_batch(inputs, "masked_mean"), len(inputs["noisy"])
    mask = dual_stream_mask(batch.stream, batch.block, batch.first)
    assert torch.equal(mask[0], stored[f"{case['name']}.mask"].bool())
    model = load_model(folder / inputs["checkpoint"])
    with torch.no_grad():
        logits = model.logits(model(batch.input_ids, batch.positions, DenseAttention(mask[:, None])))
    torch.testing.assert_close(logits[0, :length], stored[f"{case['name']}.noisy_logits"], atol=1e-3, rtol=0)

    loss, _ = multitf_loss(model, batch)
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-4)
    loss.backward()
    assert float(global_norm(p.grad for p in model.parameters())) == pytest.approx(expected["grad_norm"], rel=1e-4)
    for parameter in model.parameters():
        parameter.data = parameter.grad  # so that the gradients come under the checkpoint's names
    norms = {name: float(tensor.norm()) for name, tensor in checkpoint_tensors(model, "per_expert")}
    wanted = expected["grad_norm_per_param"]
    assert {name: norms[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


def global_norm(tensors: Iterable[Tensor | None]) -> Tensor:
    """The L2 norm over all entries; every tensor must be there."""
    norms = []
    for tensor in tensors:
        assert tensor is not None
        norms.append(tensor.norm())
    return torch.stack(norms).norm()


def check_noise(folder: Path, case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    bounds = NoiseBounds(t_low=inputs["low"], t_high=inputs["high"], margin=inputs["rho"])
    checked = 0
    for key, stats in case["expected"]["stats"].items():
        name, size = key.rsplit("_n", 1)
        if name in ("chain_uniform", "sorted_uniform"):
            rng = random.Random(key)
            draws = [SCHEDULES[name](int(size), bounds, rng) for _ in range(inputs["groups"])]
            means = [sum(d[slot] for d in draws) / len(draws) for slot in range(int(size))]
            assert means == pytest.approx(stats["mean"], abs=0.02)
            checked += 1
    assert checked == 6


CHECKS = {
    ("training", "systematic"): check_systematic_layouts,
    ("training", "mask"): check_mask,
    ("training", "masked"): check_masked_count,
    ("training", "ce"): check_masked_mean_loss,
    ("training", "ipw"): check_block_ratio_loss,
    ("training", "noise"): check_noise,
}
