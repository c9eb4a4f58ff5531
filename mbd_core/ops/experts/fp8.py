"""FP8 weights: float8_e4m3fn values with a scale per output channel, or per block of a matrix.

A value is off by at most `max(|w| / 16, scale / 1024)`: half a step of three mantissa bits, or half the smallest step.
Rounding experts saves most, because they are most of a mixture's bytes. On CUDA a linear layer with a scale per
channel multiplies in FP8, so its inputs are rounded too (one scale a token). Everywhere else the weights are widened
in the product or before it, and the inputs are not rounded.

Shape legend: T tokens, O output and I input channels, M and N blocks of channels, K experts a token, D model width,
E experts, F expert width; `...` is empty or E.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mbd_core.ops.experts.choice import loop_experts
from mbd_core.ops.experts.expert_products import LEAST_DEPTH, Scales, SharedExperts, expert_parts
from mbd_core.ops.layer.residual_norm import ExpertParts, sum_experts

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
BlockShape = tuple[int, int]
RELEASED: BlockShape = (128, 128)
"""The blocks of released weights: output channels, input channels."""


@dataclass(frozen=True)
class Fp8Weight:
    """A weight (..., O, I) in FP8 with its scales.

    `values` (..., O, I) are FP8. `scale` is float32: (..., O) per channel, or (..., M, N) per `block`. The last blocks
    may be smaller.
    """

    values: Tensor
    scale: Tensor
    block: BlockShape | None

    def __getitem__(self, chosen: Tensor) -> "Fp8Weight":
        """Some experts of a stack."""
        return Fp8Weight(self.values.view(torch.uint8)[chosen].view(FP8), self.scale[chosen], self.block)

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + 4 * self.scale.numel()


def empty_weight(shape: torch.Size, block: BlockShape | None, device: torch.device | str) -> Fp8Weight:
    """A weight of this shape (..., O, I), to be filled."""
    *stack, outputs, inputs = shape
    blocks = (outputs,) if block is None else (-(-outputs // block[0]), -(-inputs // block[1]))
    return Fp8Weight(
        torch.empty(shape, dtype=FP8, device=device),
        torch.empty((*stack, *blocks), dtype=torch.float32, device=device),
        block,
    )


def quantize(weight: Tensor, *, block: BlockShape | None = None) -> Fp8Weight:
    """Round `weight` (..., O, I) to FP8 so that the largest value of a channel (or block) is FP8's largest.

    A stack is rounded matrix by matrix, so that its peak memory is the result and float32 copies of one matrix.
    Raises `ValueError` for values that are not finite.
    """
    if weight.ndim > 2:
        whole = empty_weight(weight.shape, block, weight.device)
        for number, matrix in enumerate(weight):
            part = quantize(matrix, block=block)
            whole.values[number].copy_(part.values)
            whole.scale[number].copy_(part.scale)
        return whole
    rows, columns = block or (1, weight.shape[1])
    parts = F.pad(weight.float(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    largest = parts.abs().unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    if not bool(largest.isfinite().all()):
        raise ValueError("the weight has values that are not finite; FP8 cannot hold them")
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    scale_of_weight = scale if block is None else _spread(scale, weight.shape, block)
    values = (weight.float() / scale_of_weight).clamp(-_LARGEST, _LARGEST).to(FP8)
    return Fp8Weight(values, scale[:, 0] if block is None else scale, block)


def _spread(scale: Tensor, shape: torch.Size, block: BlockShape) -> Tensor:
    """The scale (..., M, N) of each weight (..., O, I)."""
    rows, columns = (torch.arange(n, device=scale.device) // size for n, size in zip(shape[-2:], block, strict=True))
    return scale[..., rows, :][..., columns]


def fp8_obstacle(
    weight: Tensor,
    *,
    block: BlockShape | None = None,
    capability: tuple[int, int] | None = None,
    has_triton: bool | None = None,
) -> str | None:
    """The reason why a weight (O, I), or a stack of experts (E, O, I), cannot be used in FP8 on its device; else
    `None`.

    `block` is the block of a stack's scales. A CPU widens weights and so takes every weight. `capability` and
    `has_triton` default to the device's and the installation's.
    """
    device = weight.device
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"FP8 products are taken on cpu and cuda, not on {device.type}"
    if capability is None:
        capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return "FP8 products need compute capability 8.9, this device has {}.{}".format(*capability)
    if weight.ndim > 2:
        if has_triton is None:
            has_triton = importlib.util.find_spec("triton") is not None
        if block is not None and block[1] % LEAST_DEPTH:
            return (
                f"the kernels take blocks of a multiple of {LEAST_DEPTH} input channels, not {block[0]} x {block[1]}"
            )
        return None if has_triton else "experts in FP8 need triton, which is not installed"
    odd = [size for size in weight.shape if size % 16]
    return f"FP8 products take multiples of 16 channels, not {odd[0]}" if odd else None


def dequantize(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """The weight (..., O, I) that the FP8 values and their scales represent."""
    if weight.block is None:
        return (weight.values.float() * weight.scale[..., None]).to(dtype)
    return (weight.values.float() * _spread(weight.scale, weight.values.shape, weight.block)).to(dtype)


def linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """`x` (..., I) times the weight (O, I) transposed, in the dtype of `x`.

    On CUDA the product is taken in FP8, with a scale per channel, and `x` is rounded with one scale a token.
    """
    if x.device.type != "cuda":
        return F.linear(x, dequantize(weight, x.dtype), bias)
    assert weight.block is None, "no product on CUDA takes a matrix in blocks"
    x_TI = x.reshape(-1, x.shape[-1])
    scale_T = (x_TI.float().abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=1e-12)
    rounded_TI = (x_TI.float() / scale_T).clamp(-_LARGEST, _LARGEST).to(FP8)
    out = torch._scaled_mm(
        rounded_TI,
        weight.values.t(),
        scale_a=scale_T,
        scale_b=weight.scale[None],
        out_dtype=torch.bfloat16,
    ).to(x.dtype)
    return (out if bias is None else out + bias).unflatten(0, x.shape[:-1])


def fp8_experts(
    x_TD: Tensor, gate_EFD: Fp8Weight, up_EFD: Fp8Weight, down_EDF: Fp8Weight, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """`loop_experts` (T, D) with FP8 weights, all with the same `block`.

    On CUDA the fused kernel widens them in registers. Elsewhere the chosen experts' weights are widened and the loop
    runs on them.
    """
    stacks = (gate_EFD, up_EFD, down_EDF)
    if x_TD.device.type == "cuda":
        return sum_experts(fp8_parts(x_TD, *stacks, ids_TK, weights_TK), x_TD.dtype)
    chosen = ids_TK.unique()
    chosen = chosen[chosen < len(gate_EFD.values)]  # the sentinel is no expert
    local_TK = torch.searchsorted(chosen, ids_TK)
    gate, up, down = (dequantize(stack[chosen], x_TD.dtype) for stack in stacks)
    return loop_experts(x_TD, gate, up, down, local_TK, weights_TK)


def fp8_parts(
    x_TD: Tensor,
    gate_EFD: Fp8Weight,
    up_EFD: Fp8Weight,
    down_EDF: Fp8Weight,
    ids_TK: Tensor,
    weights_TK: Tensor,
    shared: SharedExperts | None = None,
) -> ExpertParts:
    """`fp8_experts` before the sum, by the fused kernel. `shared` experts are among them and keep their dtype."""
    stacks = (gate_EFD, up_EFD, down_EDF)
    rows, columns = gate_EFD.block or (1, 0)
    scales = Scales(gate_EFD.scale, up_EFD.scale, down_EDF.scale, rows, columns)
    gate, up, down = (stack.values for stack in stacks)
    return expert_parts(x_TD, gate, up, down, ids_TK, weights_TK, scales=scales, shared=shared)


class Fp8Module(nn.Module):
    """Holds FP8 weights as buffers `<name>_values` and `<name>_scale`, moved between devices but never cast."""

    def register_weight(self, name: str, weight: Fp8Weight) -> None:
        """Registers a weight. All of a module's weights have the same `block`."""
        self.block = weight.block
        self.register_buffer(f"{name}_values", weight.values)
        self.register_buffer(f"{name}_scale", weight.scale)

    def weight(self, name: str) -> Fp8Weight:
        return Fp8Weight(self.get_buffer(f"{name}_values"), self.get_buffer(f"{name}_scale"), self.block)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the weights with the module but does not cast them: cast values would no longer fit their scales."""
        originals = {name: buffer for name, buffer in self.named_buffers(recurse=False) if name.endswith(_KEPT)}
        super()._apply(fn, recurse)
        for name, buffer in originals.items():
            moved = self.get_buffer(name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self


_KEPT = ("_values", "_scale")


class Fp8Linear(Fp8Module):
    """A linear layer whose weight is `wide.weight` rounded to FP8."""

    def __init__(self, wide: nn.Linear) -> None:
        super().__init__()
        self.register_weight("weight", quantize(wide.weight.detach()))
        self.register_buffer("bias", None if wide.bias is None else wide.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        return linear(x, self.weight("weight"), bias if isinstance(bias, Tensor) else None)


class Fp8Experts(Fp8Module):
    """Stacked experts in FP8, with the signature of `moe.Experts`.

    `take` returns one stack at a time ("gate_proj" and "up_proj" (E, F, D), "down_proj" (E, D, F)).
    """

    def __init__(self, take: Callable[[str], Fp8Weight]) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.register_weight(name, take(name))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return fp8_experts(x_TD, *self._stacks(), ids_TK, weights_TK)

    def fuses(self, num_assignments: int) -> bool:
        """Whether the fused kernel computes this number of assignments: any number, on CUDA."""
        return self.get_buffer("gate_proj_values").device.type == "cuda"

    def parts(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, shared: SharedExperts | None = None
    ) -> ExpertParts:
        """`forward` before the sum, with `shared` among the experts, by the fused kernel."""
        return fp8_parts(x_TD, *self._stacks(), ids_TK, weights_TK, shared)

    def _stacks(self) -> tuple[Fp8Weight, Fp8Weight, Fp8Weight]:
        return self.weight("gate_proj"), self.weight("up_proj"), self.weight("down_proj")
