"""How a step computes: its precision, compiled layers, and the operations that its MFU is made of.

MFU is operations that the model asks for, over seconds, over the peak of all workers' devices. Counted are the pairs
of tokens that see each other, not those that a dense mask computes besides; the backward pass is twice the forward, of
frozen matrices as much as it (under LoRA: the adapter's own operations are left out); layers that are computed again
for it do not count. A roll-out or a teacher is one forward more. The last layer's MLP and the head have the predicted
tokens alone.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mbd_core.models.decoder import Attention, Decoder, DecoderLayer
from mbd_core.models.flops import head_flops, matrix_flops, mlp_flops, pair_flops
from mbd_core.models.layer_parts import Attend
from mbd_core.models.mlp import MoE, SwiGLU
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.rope import Rope
from mbd_core.multitf.config import Precision
from mbd_core.multitf.data.encoding import IGNORE
from mbd_core.multitf.states.sample import MultiTFBatch
from mbd_core.ops.attention.whole import DenseAttention, in_many_variants
from mbd_core.ops.machine import measure_flops

# In which precision a training run computes: bfloat16 on devices with arithmetic for it, float32 on the others.


def compute_precision(precision: Precision, device: torch.device) -> Literal["float32", "bfloat16"]:
    """What `precision` means on `device`: `auto` becomes bfloat16 where the device computes it, else float32."""
    if precision == "auto":
        return "bfloat16" if computes_bfloat16(device) else "float32"
    return precision


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 arithmetic. A CPU without it takes up to 100 times as long as in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# `torch.compile` of a model in training: one compiled layer, which all layers of a kind share.
#
# A layer is one graph. Of a layer with experts the projections and the shared expert are, each: which experts compute
# is known to no trace. The last layer, whose MLP has the predicted tokens alone, is one graph more. Lengths differ
# from batch to batch, so sizes are symbols from the first compilation on, and a new length compiles nothing. What
# remains is bounded: one sample at once or several, a forward with gradients or without (roll-outs, teachers), a
# layer with an adapter switched off.
#
# `fullgraph` makes an error of what cannot be traced. Without it a layer would fall apart into graphs that differ
# from one call to the next, and activation checkpointing must meet the same ones twice.

BACKEND = "inductor"


def compile_layers(model: Decoder) -> None:
    """Compile every layer's forward; hooks, FSDP2's too, and activation checkpointing stay outside of it."""
    compiled_layer, compiled_projection, compiled_mlp = (
        _compile(f) for f in (DecoderLayer.forward, Attention.project, SwiGLU.forward)
    )
    for layer in model.model.layers:
        if not isinstance(layer.mlp, MoE):
            layer.forward = partial(_call, compiled_layer, layer)
            continue
        attention: Any = layer.self_attn
        attention.project = partial(compiled_projection, attention)
        if layer.mlp.shared_experts is not None:
            layer.mlp.shared_experts.forward = partial(compiled_mlp, layer.mlp.shared_experts)  # type: ignore[method-assign]


def _compile(function: Callable[..., Any]) -> Any:
    return in_many_variants(torch.compile(function, backend=BACKEND, dynamic=True, fullgraph=True))


def _call(forward: Any, layer: Any, rows: list[Tensor], ropes: list[Rope], attend: Attend, *others: Any) -> Any:
    """A layer's compiled forward, once what a dense mask keeps for all layers is there: a trace that makes it would be
    another one than those that find it."""
    if isinstance(attend, DenseAttention):
        attend.added(rows[0].device.type, layer.self_attn.q_proj.weight.dtype)
    return forward(layer, rows, ropes, attend, *others)


# The model's floating-point operations in an update, and the device's peak: what MFU is made of.

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
"""Of NVIDIA's data sheets: dense bfloat16, a trillion operations a second. The first name that a GPU's name holds."""


def visible_pairs(batch: MultiTFBatch) -> int:
    """Pairs of a query and a key that it sees under the Group-Aware Dual-Stream Mask, in all samples."""
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
    last_mlp = mlp_flops(config, config.num_layers - 1)

    def products(predicted: Tensor) -> float:
        everywhere = tokens * (matrix_flops(config) - last_mlp)
        return everywhere + int(predicted.sum()) * (last_mlp + head_flops(config))

    has_label = batch.labels != IGNORE
    attention = pairs * pair_flops(config)
    total = (2 if lora else 3) * products(has_label) + 3 * attention
    if rolls_out:
        total += products(batch.rollout) + attention
    if distills:
        sample_sizes = batch.sample[batch.sample >= 0].bincount()
        total += products(has_label) + int(sample_sizes.square().sum()) * pair_flops(config)
    return total


@dataclass(frozen=True)
class Peak:
    """Operations a second of one worker's device, `None` where it is not known, and where the number is from."""

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
