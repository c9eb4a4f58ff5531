"""Matrix products in int8, for CPUs: weights with a scale per output channel, inputs with a scale per token.

A block of tokens is bound by arithmetic on a CPU, and a CPU with VNNI multiplies int8 faster than float32
(`python -m benchmarks rounding`). The sums are exact (int32), and a token's scale is its own, so a token's result does
not depend on the other tokens of the call. Each value is off by at most 1/254 of the largest magnitude in its row (an
output channel or a token).

Shape legend: T tokens, O output channels, I input channels, D model width, E experts, F expert width, K experts a
token; `...` is any leading shape.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LARGEST = 127.0


def to_int8(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values (..., I) of `wide` (..., I), and the float32 scale (..., 1) of each row.

    A row of zeros has a scale above zero.
    """
    wide = wide.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
    return (wide / scale).round().to(torch.int8), scale


def int8_product(x: Tensor, values_OI: Tensor, scale_O: Tensor) -> Tensor:
    """`x @ weight^T` (..., O) in the dtype of `x` (..., I), both factors rounded to int8."""
    values_TI, scale_T1 = to_int8(x.flatten(0, -2))
    sums_TO = torch._int_mm(values_TI, values_OI.t())
    return (sums_TO * scale_T1 * scale_O).to(x.dtype).unflatten(0, x.shape[:-1])


class Int8Module(nn.Module):
    """Holds weights as buffers `<name>_values` (..., O, I) and `<name>_scale` (..., O)."""

    def round_weight(self, name: str, wide: Tensor) -> None:
        """Rounds `wide` (..., O, I) into the weight of this name, in place if the weight exists already."""
        values, scale = to_int8(wide.detach())
        for kind, new in (("values", values), ("scale", scale.squeeze(-1))):
            if f"{name}_{kind}" in self._buffers:
                self.get_buffer(f"{name}_{kind}").copy_(new)
            else:
                self.register_buffer(f"{name}_{kind}", new)

    def product(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        """`x @ weight^T` (..., O) of `x` (..., I); `expert` chooses one of stacked weights."""
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
