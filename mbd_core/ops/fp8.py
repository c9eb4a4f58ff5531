"""FP8 weights: float8_e4m3fn values with a scale per output channel, or per block of input channels.

A value is off by at most `max(|w| / 16, scale / 1024)`: half a step of three mantissa bits, or half the smallest step.
Rounding experts saves most, because they are most of a mixture's bytes. On CUDA a linear layer with a scale per
channel multiplies in FP8, so its inputs are rounded too (one scale a token). Everywhere else the weights are widened
before the product, and the inputs are not rounded.

Shape legend: T tokens, O output channels, I input channels, N blocks of input channels, K experts a token, D model
width, E experts, F expert width; `...` is empty or E.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mbd_core.ops.experts import loop_experts
from mbd_core.ops.experts_triton import expert_parts
from mbd_core.ops.residual_norm import ExpertParts, sum_experts

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True)
class Fp8Weight:
    """`values` (..., O, I) in FP8; `scale` float32, (..., O) per channel or (..., O, N) per `block` inputs."""

    values: Tensor
    scale: Tensor
    block: int | None

    def __getitem__(self, chosen: Tensor) -> "Fp8Weight":
        """Some experts of a stack."""
        return Fp8Weight(self.values.view(torch.uint8)[chosen].view(FP8), self.scale[chosen], self.block)

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + 4 * self.scale.numel()


def quantize(weight: Tensor, *, block: int | None = None) -> Fp8Weight:
    """Round `weight` (..., O, I) to FP8 so that the largest value of a channel (or block) is FP8's largest.

    A stack is rounded matrix by matrix, so that its peak memory is the result and float32 copies of one matrix.
    Raises `ValueError` for a block that does not divide the input channels, and for values that are not finite.
    """
    inputs = weight.shape[-1]
    if block is not None and (block < 1 or inputs % block):
        raise ValueError(f"block={block} does not divide the {inputs} input channels; use 128 or None")
    if weight.ndim > 2:
        return _quantize_stack(weight, block)
    parts = weight.float().unflatten(-1, (-1, inputs if block is None else block))
    largest = parts.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise ValueError("the weight has values that are not finite; FP8 cannot hold them")
    scale = torch.where(largest > 0, largest / _LARGEST, 1.0)
    values = (parts / scale[..., None]).clamp(-_LARGEST, _LARGEST).to(FP8).flatten(-2)
    return Fp8Weight(values, scale[..., 0] if block is None else scale, block)


def _quantize_stack(weight: Tensor, block: int | None) -> Fp8Weight:
    blocks = () if block is None else (weight.shape[-1] // block,)
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty((*weight.shape[:-1], *blocks), device=weight.device)
    for number, matrix in enumerate(weight):
        part = quantize(matrix, block=block)
        values[number].copy_(part.values)
        scale[number].copy_(part.scale)
    return Fp8Weight(values, scale, block)


def fp8_obstacle(
    weight: Tensor, *, capability: tuple[int, int] | None = None, has_triton: bool | None = None
) -> str | None:
    """Why a weight (O, I), or a stack of experts (E, O, I), cannot be used in FP8 on its device, or `None` if it can.

    A CPU widens weights and so takes every weight. `capability` and `has_triton` default to the device's and to what
    is installed.
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
        return None if has_triton else "experts in FP8 need triton, which is not installed"
    odd = [size for size in weight.shape if size % 16]
    return f"FP8 products take multiples of 16 channels, not {odd[0]}" if odd else None


def dequantize(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """The weight (..., O, I) that the FP8 values and their scales represent."""
    if weight.block is None:
        return (weight.values.float() * weight.scale[..., None]).to(dtype)
    parts = weight.values.float().unflatten(-1, (-1, weight.block))
    return (parts * weight.scale[..., None]).flatten(-2).to(dtype)


def linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """`x` (..., I) times the weight (O, I) transposed, in the dtype of `x`.

    On CUDA with a scale per channel the product is taken in FP8, and `x` is rounded with one scale a token.
    """
    if x.device.type != "cuda" or weight.block is not None:
        return F.linear(x, dequantize(weight, x.dtype), bias)
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
    """`loop_experts` (T, D) with FP8 weights.

    On CUDA with a scale per channel the fused kernel widens them in registers. Otherwise the chosen experts' weights
    are widened and the loop runs on them.
    """
    found = fp8_parts(x_TD, gate_EFD, up_EFD, down_EDF, ids_TK, weights_TK)
    return found if isinstance(found, Tensor) else sum_experts(found, x_TD.dtype)


def fp8_parts(
    x_TD: Tensor, gate_EFD: Fp8Weight, up_EFD: Fp8Weight, down_EDF: Fp8Weight, ids_TK: Tensor, weights_TK: Tensor
) -> ExpertParts | Tensor:
    """`fp8_experts`, not summed yet where the fused kernel computes it."""
    stacks = (gate_EFD, up_EFD, down_EDF)
    if x_TD.device.type == "cuda" and all(stack.block is None for stack in stacks):
        scales = (gate_EFD.scale, up_EFD.scale, down_EDF.scale)
        return expert_parts(x_TD, gate_EFD.values, up_EFD.values, down_EDF.values, ids_TK, weights_TK, scales=scales)
    chosen = ids_TK.unique()
    chosen = chosen[chosen < len(gate_EFD.values)]  # the sentinel is no expert
    local_TK = torch.searchsorted(chosen, ids_TK)
    gate, up, down = (dequantize(stack[chosen], x_TD.dtype) for stack in stacks)
    return loop_experts(x_TD, gate, up, down, local_TK, weights_TK)


class Fp8Module(nn.Module):
    """Holds FP8 weights as buffers `<name>_values` and `<name>_scale`, moved between devices but never cast."""

    def register_weight(self, name: str, weight: Fp8Weight) -> None:
        """Register a weight. All of a module's weights have the same `block`."""
        self.block = weight.block
        self.register_buffer(f"{name}_values", weight.values)
        self.register_buffer(f"{name}_scale", weight.scale)

    def weight(self, name: str) -> Fp8Weight:
        return Fp8Weight(self.get_buffer(f"{name}_values"), self.get_buffer(f"{name}_scale"), self.block)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move with the module, but stay FP8 and float32: cast values would no longer fit their scales."""
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

    def __init__(self, wide: nn.Linear, *, block: int | None = None) -> None:
        super().__init__()
        self.register_weight("weight", quantize(wide.weight.detach(), block=block))
        self.register_buffer("bias", None if wide.bias is None else wide.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        return linear(x, self.weight("weight"), bias if isinstance(bias, Tensor) else None)


class Fp8Experts(Fp8Module):
    """Stacked experts in FP8, with the signature of `moe.Experts`.

    `take` returns one wide stack at a time ("gate_proj" and "up_proj" (E, F, D), "down_proj" (E, D, F)). If the caller
    keeps no reference to it, the peak memory is one wide stack beside the FP8 ones.
    """

    def __init__(self, take: Callable[[str], Tensor], *, block: int | None = None) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.register_weight(name, quantize(take(name), block=block))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return fp8_experts(x_TD, *self._stacks(), ids_TK, weights_TK)

    def parts(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> ExpertParts | Tensor:
        """`forward`, not summed yet where the fused kernel computes it."""
        return fp8_parts(x_TD, *self._stacks(), ids_TK, weights_TK)

    def _stacks(self) -> tuple[Fp8Weight, Fp8Weight, Fp8Weight]:
        return self.weight("gate_proj"), self.weight("up_proj"), self.weight("down_proj")
