"""Matrix products in int8, for CPUs: weights with a scale per output channel, inputs with a scale per token.

A block of tokens is bound by arithmetic on a CPU, a single token by the bytes of the weights, and int8 saves both
(`python -m benchmarks forward --dtype auto,int8`). The sums are exact (int32), and a token's scale is its own, so a
token's result does not depend on the other tokens of the call.

A CPU with VNNI multiplies by `torch._int_mm`, which an x86 CPU without it computes 20 times slower than float32. Such
a CPU multiplies by FBGEMM, torch's own library of quantised products, whose AVX2 kernels add two products in 16 bits:
7 bits of a weight and 8 of an input fit there. So a token's values are off by at most 1/254 of their largest
magnitude, and an output channel's weights by 1/254 or, without VNNI, 1/126.

Shape legend: T tokens, O output channels, I input channels, D model width, E experts, F expert width, K experts a
token; `...` is any leading shape.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST = 127
LARGEST_PACKED_WEIGHT = 63
"""2 * 63 * 255 fits into 16 bits, where 255 is the largest input as FBGEMM has it, without a sign."""
_ZERO_POINT = 128


@cache
def packs_weights() -> bool:
    """Whether this machine multiplies by FBGEMM, which needs the weights in an order of its own."""
    has = torch.cpu.get_capabilities()
    if has["architecture"] != "x86_64" or has["avx512_vnni"] or has["amx_int8"]:
        return False
    return bool(has["avx2"]) and "fbgemm" in torch.backends.quantized.supported_engines


def to_int8(wide: Tensor, largest: int = LARGEST) -> tuple[Tensor, Tensor]:
    """Int8 values (..., I) of `wide` (..., I), of magnitude `largest` at most, and the float32 scale (..., 1) of each
    row.

    A row of zeros has a scale above zero.
    """
    values, scale = _rounded(wide.float(), largest)
    return values.to(torch.int8), scale


def _rounded(wide: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """As `to_int8`, with the values in float32."""
    scale = wide.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny * largest).div_(largest)
    return (wide / scale).round_(), scale


def int8_product(x: Tensor, values_OI: Tensor, scale_O: Tensor) -> Tensor:
    """`x @ weight^T` (..., O) in the dtype of `x` (..., I), both factors rounded to int8."""
    values_TI, scale_T1 = to_int8(x.flatten(0, -2))
    sums_TO = torch._int_mm(values_TI, values_OI.t())
    return (sums_TO * scale_T1 * scale_O).to(x.dtype).unflatten(0, x.shape[:-1])


def pack(values_OI: Tensor, scale_O: Tensor) -> Any:
    """A weight as FBGEMM reads it. Its values are of magnitude `LARGEST_PACKED_WEIGHT` at most."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)  # a later torch has other names
        zeros = torch.zeros(len(scale_O), dtype=torch.long)
        weight = torch._make_per_channel_quantized_tensor(values_OI, scale_O, zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)


def packed_product(x: Tensor, weight: Any) -> Tensor:
    """`int8_product` (..., O) of `x` (..., I) and a packed weight."""
    values_TI, scale_T1 = _rounded(x.flatten(0, -2).float(), LARGEST)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    sums_TO = multiply(values_TI, 1.0, _ZERO_POINT, weight)  # of whole numbers, which a scale of 1 leaves as they are
    return sums_TO.mul_(scale_T1).to(x.dtype).unflatten(0, x.shape[:-1])


class Int8Module(nn.Module):
    """Holds weights as buffers `<name>_values` (..., O, I) and `<name>_scale` (..., O), and packed where the machine
    multiplies so."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[str, list[Any]] = {}  # of a name each expert's weight, or the one weight

    def round_weight(self, name: str, wide: Tensor) -> None:
        """Rounds `wide` (..., O, I) into the weight of this name, in place if the weight exists already."""
        values, scale = to_int8(wide.detach(), LARGEST_PACKED_WEIGHT if packs_weights() else LARGEST)
        for kind, new in (("values", values), ("scale", scale.squeeze(-1))):
            if f"{name}_{kind}" in self._buffers:
                self.get_buffer(f"{name}_{kind}").copy_(new)
            else:
                self.register_buffer(f"{name}_{kind}", new)
        if packs_weights() and values.device.type == "cpu":
            each = zip(values.reshape(-1, *values.shape[-2:]), scale.reshape(-1, values.shape[-2]), strict=True)
            self._packed[name] = [pack(*weight) for weight in each]

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights, beside the buffers."""
        values = [buffer for name, buffer in self.named_buffers(recurse=False) if name.endswith("_values")]
        return sum(buffer.nbytes for buffer in values) if packs_weights() else 0

    def product(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        """`x @ weight^T` (..., O) of `x` (..., I); `expert` chooses one of stacked weights."""
        if name in self._packed:
            return packed_product(x, self._packed[name][expert or 0])
        values, scale = self.get_buffer(f"{name}_values"), self.get_buffer(f"{name}_scale")
        return int8_product(x, values, scale) if expert is None else int8_product(x, values[expert], scale[expert])


class Int8Linear(Int8Module):
    """A linear layer whose weight is `wide.weight` rounded to int8."""

    def __init__(self, wide: nn.Linear) -> None:
        super().__init__()
        self.round_weight("weight", wide.weight)
        self.register_buffer("bias", None if wide.bias is None else wide.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        out, bias = self.product(x, "weight"), self.bias
        return out + bias if isinstance(bias, Tensor) else out


class Int8Experts(Int8Module):
    """Stacked experts in int8, called as `mlp.Experts` is; `act` is silu or gelu."""

    def __init__(self, wide: nn.Module, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.act = act
        for name in ("gate_proj", "up_proj", "down_proj"):
            self.round_weight(name, wide.get_parameter(name))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Each token's weighted sum (T, D) over its experts, summed in float32, as `loop_experts` makes it."""
        num_experts = len(self.get_buffer("gate_proj_scale"))
        out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        for expert in ids_TK.unique().tolist():
            if expert >= num_experts:  # no expert
                continue
            tokens, column = (ids_TK == expert).nonzero(as_tuple=True)
            x = x_TD[tokens]
            hidden = self.act(self.product(x, "gate_proj", expert)) * self.product(x, "up_proj", expert)
            y = self.product(hidden, "down_proj", expert).float()
            out_TD.index_add_(0, tokens, y * weights_TK[tokens, column, None].float())
        return out_TD.to(x_TD.dtype)

    def fuses(self, num_assignments: int) -> bool:
        """Never: the kernels for few tokens do not compute int8."""
        return False
