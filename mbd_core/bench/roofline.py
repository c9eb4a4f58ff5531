"""The least time a decode step can take on a machine: bytes and FLOPs counted from the model, speeds measured.

The count has only the work that no implementation avoids: one read of every weight in use, one read of the prefix's
keys and values for each sequence, one write and one read of the buffer's, and the multiplications. Activations and
logits are not counted: a perfect kernel keeps them on the chip.
"""

from dataclasses import dataclass

import torch

from mbd_core.models.flops import head_flops, matrix_flops, pair_flops
from mbd_core.models.model_config import ModelConfig
from mbd_core.ops.call_timing import best_seconds
from mbd_core.ops.matmul_speed import measure_flops


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The bytes that one decode step must move and its floating-point operations (two for each multiply-add)."""

    weight_bytes: float
    kv_bytes: float
    flops: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The measured speed of a device: bytes and floating-point operations a second."""

    bandwidth: float
    flops: float


def distinct_experts(num_experts: int, per_token: int, tokens: int) -> float:
    """The mean number of experts that T tokens use if each picks K of E at random: E (1 - (1 - K/E)^T)."""
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** tokens)


def step_cost(
    config: ModelConfig,
    *,
    rows: int,
    buffer_size: int,
    prefix: int,
    block_size: int | None = None,
    dtype_bytes: float = 2,
    matrix_bytes: float | None = None,
    expert_bytes: float | None = None,
    logit_tokens: int | None = None,
    touched_experts: float | None = None,
) -> StepCost:
    """The cost of one step of `rows` sequences with `buffer_size` slots each after `prefix` stored tokens.

    `block_size` is by default the model's. `matrix_bytes` and `expert_bytes` are the bytes of one weight in the
    layers' matrices and in the experts, by default `dtype_bytes` (1 for FP8). `logit_tokens` is the number of
    positions with logits, by default all of the buffer. `touched_experts` is the number of experts that a layer's
    tokens use, as counted; by default that of independent choices, which a router need not make. Raises `ValueError`
    for counts that are not positive.
    """
    block = config.block_size if block_size is None else block_size
    if min(rows, buffer_size, block) < 1 or prefix < 0:
        raise ValueError(
            f"rows={rows}, buffer_size={buffer_size}, block_size={block} must be at least 1, prefix={prefix} 0 or more"
        )
    tokens = rows * buffer_size * block
    logit_tokens = tokens if logit_tokens is None else logit_tokens
    matrix_bytes = dtype_bytes if matrix_bytes is None else matrix_bytes
    expert_bytes = dtype_bytes if expert_bytes is None else expert_bytes
    d, c = config.hidden_size, config.head_dim
    attention = d * c * (2 * config.num_heads + 2 * config.num_kv_heads)
    dense = 3 * d * config.intermediate_size
    weight_bytes = 0.0
    for layer in range(config.num_layers):
        weight_bytes += attention * matrix_bytes
        moe = config.moe if config.is_sparse(layer) else None
        if moe is None:
            weight_bytes += dense * matrix_bytes
            continue
        expert = 3 * d * moe.intermediate_size
        router, shared = d * moe.num_experts, 3 * d * moe.shared_size
        even = distinct_experts(moe.num_experts, moe.experts_per_token, tokens)
        touched = even if touched_experts is None else touched_experts
        weight_bytes += router * dtype_bytes + shared * matrix_bytes + touched * expert * expert_bytes
    head = config.vocab_size * d
    weight_bytes += tokens * d * dtype_bytes + (head * dtype_bytes if logit_tokens else 0)

    # Slot i of a sequence attends to the prefix and slots 0..i.
    num_scores = sum(prefix + (slot + 1) * block for slot in range(buffer_size)) * block * rows
    attention_flops = pair_flops(config) * num_scores
    kv_token = 2 * config.num_layers * config.num_kv_heads * c * dtype_bytes
    return StepCost(
        weight_bytes=weight_bytes,
        kv_bytes=kv_token * (rows * prefix + 2 * tokens),
        flops=tokens * matrix_flops(config) + attention_flops + logit_tokens * head_flops(config),
    )


def floor_seconds(cost: StepCost, machine: Machine) -> float:
    """The least time of a step: the larger of the times for its bytes and for its operations."""
    return max(cost.bytes / machine.bandwidth, cost.flops / machine.flops)


def measure_bandwidth(device: torch.device, *, num_bytes: int | None = None, repeats: int = 5) -> float:
    """Bytes a second between the device's memory and its cores: the best of a sum (1 pass, it only reads, as a decode
    step almost does), a copy (2 passes) and a triad (3 passes).

    Arrays of `num_bytes` each, by default 1 GiB on CUDA and 128 MiB elsewhere; three of them must fit.
    """
    if num_bytes is None:
        num_bytes = 2**30 if device.type == "cuda" else 2**27
    a, b, c = (torch.ones(num_bytes // 4, device=device) for _ in range(3))
    copy = 2 * num_bytes / best_seconds(lambda: a.copy_(b), device, repeats)
    triad = 3 * num_bytes / best_seconds(lambda: torch.add(b, c, alpha=3.0, out=a), device, repeats)
    read = num_bytes / best_seconds(lambda: torch.sum(a), device, repeats)
    return max(read, copy, triad)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure both speeds of this device."""
    return Machine(bandwidth=measure_bandwidth(device), flops=measure_flops(device, dtype))
