"""MultiTF's layouts, masks, noise and losses."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mbd_core.checkpoint.loading import load_model
from mbd_core.multitf.layout import GroupLayout, systematic_layouts
from mbd_core.multitf.loss import multitf_loss
from mbd_core.multitf.mask import dual_stream_mask
from mbd_core.multitf.noise import SCHEDULES, NoiseBounds, num_masked
from mbd_core.multitf.sample import IGNORE, Example, NoisyStream, StateConfig, collate, lay_out


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


def check_block_ratio_loss(folder: Path, case: dict[str, Any]) -> None:
    """Eq. B.13 over all K blocks; the reference's own self-normalised loss is another one."""
    inputs, size = case["inputs"], case["inputs"]["block_size"]
    example = Example(tuple(inputs["clean"]), inputs["prompt_length"])
    noisy = NoisyStream(
        tokens=inputs["noisy"],
        masked=[label != IGNORE for label in inputs["labels"]],
        ratio=[t for t in inputs["t_per_block"] for _ in range(size)],
    )
    config = StateConfig(block_size=size, max_group=max(inputs["layout"]), weighting="block_ratio")
    row = lay_out(example, [(GroupLayout(tuple(inputs["layout"])), noisy)], config, first_block=0)
    with torch.no_grad():
        loss, _ = multitf_loss(load_model(folder / inputs["checkpoint"]), collate([row]))
    assert float(loss) == pytest.approx(case["expected"]["paper_B13_over_all_K_blocks"], rel=1e-4)


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
    ("training", "ipw"): check_block_ratio_loss,
    ("training", "noise"): check_noise,
}
