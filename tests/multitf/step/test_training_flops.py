"""Operations of an update against the mask itself and against torch's own counter; peaks by name."""

import random
from dataclasses import replace

import pytest
import torch
from family_models import FAMILIES, random_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mbd_core.models.flops import head_flops, matrix_flops, mlp_flops, pair_flops
from mbd_core.multitf.data.example import IGNORE, Example
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.mask import dual_stream_mask
from mbd_core.multitf.states.sample import build_batch
from mbd_core.multitf.step import mfu as training_flops
from mbd_core.multitf.step.loss import distillation_loss, multitf_loss
from mbd_core.multitf.step.mfu import Peak, device_peak, mfu, named_peak, update_flops, visible_pairs

B, CPU = 4, torch.device("cpu")
STATES = {
    "systematic": StateConfig(block_size=B, max_group=3, num_random=2),
    "response": StateConfig(block_size=B, max_group=2, span="response"),
    "one group": StateConfig(block_size=B, layouts="one_group"),
    "d2f": StateConfig(block_size=B, layouts="d2f", weighting="ratio_mean"),
    "self-denoising": StateConfig(block_size=B, max_group=2, self_denoising="both", labels="answer"),
}


def batch_of(states: StateConfig, *lengths: int) -> MultiTFBatch:
    rng = random.Random(0)
    examples = [Example(tuple(rng.randrange(2, 300) for _ in range(n)), 6) for n in lengths]
    return build_batch(examples, states, mask_token_id=0, rngs=[random.Random(n) for n in range(len(lengths))])


@pytest.mark.parametrize("states", STATES)
def test_pairs_are_those_of_the_mask(states: str) -> None:
    batch = batch_of(STATES[states], 48, 20)
    mask = dual_stream_mask(batch.stream, batch.block, batch.first)
    real = batch.stream >= 0
    assert not bool(real.all())
    assert visible_pairs(batch) == int(mask[real].sum())


@pytest.mark.parametrize("kind", ["cross entropy", "self-denoising", "distillation"])
def test_an_update_costs_what_torch_counts(kind: str) -> None:
    """A dense mask computes all pairs, and the matrices have no work besides what is counted."""
    config = replace(FAMILIES["sdar"], num_layers=3)
    model = random_model(config)
    batch = batch_of(STATES["self-denoising"] if kind == "self-denoising" else STATES["one group"], 24)
    dense = batch.stream.shape[1] ** 2
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # of the kernels it counts these
        loss = (
            distillation_loss(model, batch, "student_teacher")
            if kind == "distillation"
            else multitf_loss(model, batch)
        )
        loss[0].backward()
    flops = update_flops(config, batch, rolls_out=kind == "self-denoising", distills=kind == "distillation")
    forwards = {"cross entropy": 3, "self-denoising": 4, "distillation": 3}[kind]
    hidden_pairs = forwards * (dense - visible_pairs(batch)) * pair_flops(config)
    assert counter.get_total_flops() == pytest.approx(flops + hidden_pairs, rel=1e-6)


def test_under_an_adapter_frozen_matrices_have_no_gradient_of_their_own() -> None:
    config, batch = FAMILIES["sdar"], batch_of(STATES["one group"], 24)
    saved = update_flops(config, batch) - update_flops(config, batch, lora=True)
    labels = int((batch.labels != IGNORE).sum())
    last = mlp_flops(config, config.num_layers - 1)
    assert 0 < labels < batch.num_tokens
    assert saved == batch.num_tokens * (matrix_flops(config) - last) + labels * (last + head_flops(config))


def test_a_peak_is_known_by_name_or_measured_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA H200": 989.4,
        "NVIDIA H200 NVL": 835.0,
        "NVIDIA GH200 480GB": 989.4,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA L40S": 362.0,
        "NVIDIA L4": 121.0,
    }
    for name, tflops in names.items():
        assert named_peak(name, "bfloat16").flops == tflops * 1e12, name
    assert named_peak("NVIDIA L40", "bfloat16") == Peak(None, "the peak of NVIDIA L40 is not known")
    assert "in float32 is kept" in named_peak("NVIDIA H100 PCIe", "float32").source
    monkeypatch.setattr(training_flops, "computes_bfloat16", lambda device: False)
    assert str(device_peak(CPU, "bfloat16")) == "MFU is left out: this CPU emulates bfloat16"
    here = device_peak(CPU, "float32")
    assert here.flops is not None and here.flops > 1e8 and "measured on this CPU" in str(here)


def test_mfu_is_of_all_workers_peaks() -> None:
    assert mfu(6e12, 2.0, Peak(1e12, "x"), 6) == 0.5
    assert mfu(6e12, 2.0, Peak(None, "x"), 6) is None
