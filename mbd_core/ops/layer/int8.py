"""Matrix products in int8, for CPUs: weights with a scale per output channel, inputs with a scale per token.

A block of tokens is bound by arithmetic on a CPU, a single token by the bytes of the weights, and int8 saves both
where bfloat16 is not computed in hardware (`python -m benchmarks forward --dtype auto,int8`). The sums are exact
(int32), and a token's scale is its own, so a token's result does not depend on the other tokens of the call.

A CPU with AVX512-VNNI multiplies by `torch._int_mm`, which is slower than float32 on an x86 CPU without it. Such a CPU
multiplies by FBGEMM, torch's own library of quantised products, whose AVX2 kernels add two
products in 16 bits: 7 bits of a weight and 8 of an input fit there. So a token's values are off by at most 1/254 of
their largest magnitude, and an output channel's weights by 1/254 or, in FBGEMM, 1/126.

Shape legend: T tokens, O output channels, I input channels, D model width, E experts, F expert width, K experts a
token; `...` is any leading shape.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST = 127
LARGEST_PACKED_WEIGHT = 63
"""2 * 63 * 255 fits into 16 bits, where 255 is the largest input as FBGEMM has it, without a sign."""
_ZERO_POINT = 128
warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)  # quantised tensors are deprecated


@cache
def packs_weights() -> bool:
    """Whether this machine multiplies by FBGEMM, which needs the weights in an order of its own."""
    has = torch.cpu.get_capabilities()
    if has["architecture"] != "x86_64" or has.get("avx512_vnni") or has.get("amx_int8"):
        return False
    return bool(has.get("avx2")) and "fbgemm" in torch.backends.quantized.supported_engines


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
    return _shaped_as(x, (sums_TO * scale_T1).mul_(scale_O))


def pack(values_OI: Tensor) -> Any:
    """A weight in FBGEMM's order. Its values are of magnitude `LARGEST_PACKED_WEIGHT` at most."""
    return torch.ops.quantized.linear_prepack(torch._make_per_tensor_quantized_tensor(values_OI, 1.0, 0), None)


def packed_product(x: Tensor, weight: Any, scale_O: Tensor) -> Tensor:
    """`int8_product` (..., O) of `x` (..., I) and a packed weight."""
    values_TI, scale_T1 = _rounded(x.flatten(0, -2).float(), LARGEST)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    sums_TO = multiply(values_TI, 1.0, _ZERO_POINT, weight)  # of whole numbers, which a scale of 1 leaves as they are
    return _shaped_as(x, sums_TO.mul_(scale_T1).mul_(scale_O))


def _shaped_as(x: Tensor, out_TO: Tensor) -> Tensor:
    """`out_TO` in the leading shape and the dtype of `x`, by no operation where it has both. A single token's
    forward is bound by the calls of such operations."""
    out = out_TO if out_TO.dtype == x.dtype else out_TO.to(x.dtype)
    return out if x.ndim == 2 else out.unflatten(0, x.shape[:-1])


def _packed_bytes(num_outputs: int, num_inputs: int) -> int:
    """Bytes of a packed weight, which FBGEMM fills up to whole blocks."""
    outputs, inputs = (32, 256) if torch.cpu.get_capabilities().get("avx512_f") else (8, 512)
    return -(-num_outputs // outputs) * outputs * -(-num_inputs // inputs) * inputs


class Int8Module(nn.Module):
    """Holds weights as buffers `<name>_values` (..., O, I) and `<name>_scale` (..., O).

    Where `packs_weights()`, packed weights are in the place of the values. `round_weight` alone changes a weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[str, list[Any]] = {}  # by name: the packed weight of each expert, or of the layer
        self.packed_bytes = 0

    def round_weight(self, name: str, wide: Tensor) -> None:
        """Rounds `wide` (..., O, I) into the weight of this name, in place if the weight exists already."""
        packs = packs_weights()
        values, scale = to_int8(wide.detach(), LARGEST_PACKED_WEIGHT if packs else LARGEST)
        new = {"scale": scale.squeeze(-1)} | ({} if packs else {"values": values})
        for kind, tensor in new.items():
            if f"{name}_{kind}" in self._buffers:
                self.get_buffer(f"{name}_{kind}").copy_(tensor)
            else:
                self.register_buffer(f"{name}_{kind}", tensor)
        if packs:
            weights = values.flatten(0, -3) if values.ndim > 2 else values[None]
            self.packed_bytes += 0 if name in self._packed else len(weights) * _packed_bytes(*values.shape[-2:])
            self._packed[name] = [] if values.is_meta else [pack(weight) for weight in weights]

    def product(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        """`x @ weight^T` (..., O) of `x` (..., I); `expert` chooses one of stacked weights."""
        scale: Tensor = getattr(self, f"{name}_scale")
        scale_O = scale if expert is None else scale[expert]
        if name in self._packed:
            (weight,) = self._packed[name] if expert is None else self._packed[name][expert : expert + 1]
            return packed_product(x, weight, scale_O)
        values: Tensor = getattr(self, f"{name}_values")
        return int8_product(x, values if expert is None else values[expert], scale_O)


class Int8Linear(Int8Module):
    """A linear layer whose weight is `wide.weight` rounded to int8."""

    def __init__(self, wide: nn.Linear) -> None:
        super().__init__()
        self.round_weight("weight", wide.weight)
        self.register_buffer("bias", None if wide.bias is None else wide.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        out, bias = self.product(x, "weight"), self.bias
        return out + bias if isinstance(bias, Tensor) else out


class Int8Joint(Int8Module):
    """The products of one input with the weights of several linear layers, side by side: it is rounded once."""

    def __init__(self, wides: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.round_weight("weight", torch.cat([wide.weight.detach() for wide in wides]))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, "weight")


class Int8Part(nn.Module):
    """One layer of an `Int8Joint`, with a bias of its own: the joint product's `columns`."""

    def __init__(self, joint: Int8Joint, columns: slice, bias: Tensor | None) -> None:
        super().__init__()
        self.joint, self.columns = joint, columns
        self.register_buffer("bias", None if bias is None else bias.detach())

    @classmethod
    def of(cls, wides: Sequence[nn.Linear]) -> "list[Int8Part]":
        """The layers `wides`, which read one input."""
        joint, ends = Int8Joint(wides), itertools.accumulate((wide.out_features for wide in wides), initial=0)
        columns = [slice(*bounds) for bounds in itertools.pairwise(ends)]
        return [cls(joint, own, wide.bias) for own, wide in zip(columns, wides, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.joint(x))

    def take(self, joint_out: Tensor) -> Tensor:
        """This layer's output, of the joint product's."""
        out, bias = joint_out[..., self.columns], self.bias
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
