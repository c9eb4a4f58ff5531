"""The model's floating-point operations in an update, the device's peak, and their ratio, MFU.

MFU is the model's operations divided by the seconds and by the peak of all workers' devices. The pairs of tokens that
see each other count; further pairs of a dense mask do not. The backward pass counts twice the forward. With frozen
matrices it counts as much as the forward (under LoRA the adapter's own operations are left out). Layers that the
backward pass computes again do not count twice. A roll-out or a teacher is one more forward. The last layer's MLP and
the head compute only the predicted tokens.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from mbd_core.models.flops import head_flops, matrix_flops, mlp_flops, pair_flops
from mbd_core.models.model_config import ModelConfig
from mbd_core.multitf.data.example import IGNORE
from mbd_core.multitf.states.batch import MultiTFBatch
from mbd_core.ops.machine import computes_bfloat16, measure_flops

BFLOAT16_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
}
"""NVIDIA's data sheets: dense bfloat16, a trillion operations a second. The first entry in a GPU's name counts."""


def visible_pairs(batch: MultiTFBatch) -> int:
    """Pairs of a query and a visible key under the Group-Aware Dual-Stream Mask, in all samples."""
    is_token = batch.stream >= 0
    sample, stream, block, first = (
        column[is_token] for column in (batch.sample, batch.stream, batch.block, batch.first)
    )
    samples, num_streams, num_blocks = (int(column.max()) + 1 for column in (sample, stream, block))
    place = (sample * num_streams + stream) * num_blocks + block
    counts = torch.bincount(place, minlength=samples * num_streams * num_blocks)
    # up_to[s, n, b]: tokens of stream n in its blocks before block b
    up_to = torch.zeros(samples, num_streams, num_blocks + 1, dtype=torch.int64)
    up_to[..., 1:] = counts.view(samples, num_streams, num_blocks).cumsum(-1)
    to_clean = up_to[sample, 0, first]
    in_group = up_to[sample, stream, block + 1] - up_to[sample, stream, first.clamp(max=num_blocks)]
    return int(to_clean.sum() + in_group[stream > 0].sum())


def update_flops(
    config: ModelConfig, batch: MultiTFBatch, *, rolls_out: bool = False, distills: bool = False, lora: bool = False
) -> float:
    """The operations of one update on a batch that lies on the CPU."""
    tokens, pairs = batch.num_tokens, visible_pairs(batch)

    def products(predicted: Tensor) -> float:
        return _products(config, tokens, int(predicted.sum()))

    has_label = batch.labels != IGNORE
    attention = pairs * pair_flops(config)
    total = (2 if lora else 3) * products(has_label) + 3 * attention
    if rolls_out:
        total += products(batch.rollout) + attention
    if distills:
        sample_sizes = batch.sample[batch.sample >= 0].bincount()
        total += products(has_label) + int(sample_sizes.square().sum()) * pair_flops(config)
    return total


def forward_flops(config: ModelConfig, batch: MultiTFBatch, predicted: int) -> float:
    """The operations of a forward without gradients, in which some tokens are predicted."""
    return _products(config, batch.num_tokens, predicted) + visible_pairs(batch) * pair_flops(config)


def _products(config: ModelConfig, tokens: int, predicted: int) -> float:
    last_mlp = mlp_flops(config, config.num_layers - 1)
    return tokens * (matrix_flops(config) - last_mlp) + predicted * (last_mlp + head_flops(config))


@dataclass(frozen=True)
class Peak:
    """Operations a second of one worker's device (`None`: unknown), and the number's origin."""

    flops: float | None
    source: str

    def __str__(self) -> str:
        if self.flops is None:
            return f"MFU is left out: {self.source}"
        return f"MFU is of {self.flops / 1e12:,.3g} TFLOP/s a worker ({self.source})"


def device_peak(device: torch.device, precision: str) -> Peak:
    """The peak of a GPU by its name, in bfloat16; of a CPU the speed of a matrix product, measured now."""
    if device.type == "cuda":
        return named_peak(torch.cuda.get_device_name(device), precision)
    if precision == "bfloat16" and not computes_bfloat16(device):
        return Peak(None, "this CPU emulates bfloat16")
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return Peak(measure_flops(device, dtype, size=512), f"a matrix product in {precision}, measured on this CPU")


def named_peak(name: str, precision: str) -> Peak:
    """The peak of the GPU of this name."""
    if precision != "bfloat16":
        return Peak(None, f"no peak of {name} in {precision} is kept, only in bfloat16")
    for name_part, tflops in BFLOAT16_TFLOPS.items():
        if re.search(rf"\b{name_part}\b", name):
            return Peak(tflops * 1e12, f"{name}, dense bfloat16")
    return Peak(None, f"the peak of {name} is not known")


def mfu(flops: float, seconds: float, peak: Peak, num_workers: int) -> float | None:
    """The share of the peak that an update reached, over all workers."""
    return None if peak.flops is None or seconds <= 0 else flops / seconds / (peak.flops * num_workers)
