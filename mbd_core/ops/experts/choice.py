"""The experts of a mixture-of-experts layer: the loop that defines the result, and faster implementations of it.

`loop_experts` loops over the chosen experts. `grouped_experts` sorts the tokens by expert and multiplies all experts
at once with torch's grouped matmul. `fused_experts` (`expert_products.py`) gathers, multiplies and scatters in two
kernels, for the few tokens that an expert gets while decoding. All three take the same arguments and return the same
result.

Shape legend: T tokens, K experts a token, A = T * K assignments, D model width, E experts, F expert width.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from mbd_core.ops.experts.expert_products import expert_parts
from mbd_core.ops.layer.residual_norm import sum_experts


def sort_by_expert(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Assignments sorted by expert (A,), and the end of each expert's assignments (E,), int32; no host reads.

    Assignments to the sentinel E, which is no expert, stand last, after all ends.
    """
    sorted_A, order_A = ids_TK.flatten().sort(stable=True)
    every_E = torch.arange(num_experts, device=ids_TK.device, dtype=sorted_A.dtype)
    ends_E = torch.searchsorted(sorted_A, every_E, right=True, out_int32=True)
    return order_A, ends_E


def unsort(y_AD: Tensor, order_A: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum (T, D) of each token's outputs, from sorted outputs (A, D), in float32."""
    tokens, per_token = weights_TK.shape
    y = torch.empty(y_AD.shape, dtype=torch.float32, device=y_AD.device)
    y[order_A] = y_AD.float()
    return (y.view(tokens, per_token, -1) * weights_TK[..., None].float()).sum(1)


def without_sentinels(out_TD: Tensor, ids_TK: Tensor, num_experts: int) -> Tensor:
    """`out_TD` with zeros for the tokens that go to no expert, whose sums are of uninitialised memory."""
    return torch.where(ids_TK[:, :1] < num_experts, out_TD, 0.0)


ExpertsFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""x (T, D), gate (E, F, D), up (E, F, D), down (E, D, F), ids (T, K), weights (T, K) -> (T, D), as `loop_experts`."""
MANY = 32
"""Grouped products are used from this mean number of tokens for each expert on. It has not been measured: it is two
tiles of the fused kernel, which reads an expert's weights again for every tile."""


def loop_experts(
    x_TD: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    act: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """Each token's weighted sum over its experts' SwiGLU, `down(silu(gate x) * up x)`: (T, D) in the dtype of `x_TD`.
    `act` replaces silu.

    `ids_TK` (integer) names a token's experts, `weights_TK` their weights. An expert's output is weighted and summed
    in float32 and the sum is cast once. An expert that no token chose costs nothing. A token whose ids are all E has
    no expert, and its sum is zero.
    """
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for expert in ids_TK.unique().tolist():
        if expert == len(gate_EFD):
            continue
        tokens, column = (ids_TK == expert).nonzero(as_tuple=True)
        x = x_TD[tokens]
        hidden = act(x @ gate_EFD[expert].T) * (x @ up_EFD[expert].T)
        y = (hidden @ down_EDF[expert].T).float()
        out_TD.index_add_(0, tokens, y * weights_TK[tokens, column, None].float())
    return out_TD.to(x_TD.dtype)


def grouped_experts(
    x_TD: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    act: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """`loop_experts` by sorting and three grouped matmuls. Shapes depend only on T and K, so CUDA graphs can capture
    it.

    Raises `ValueError` if a row of weights is not a multiple of 16 bytes, as the grouped matmul requires.
    """
    obstacle = _alignment_obstacle(x_TD.dtype, *gate_EFD.shape[1:])
    if obstacle is not None:
        raise ValueError(f"grouped experts cannot be used: {obstacle}; use the loop")
    order_A, ends_E = sort_by_expert(ids_TK, gate_EFD.shape[0])
    x_AD = x_TD[order_A // ids_TK.shape[1]]
    gate_AF = F.grouped_mm(x_AD, gate_EFD.transpose(1, 2), offs=ends_E)
    up_AF = F.grouped_mm(x_AD, up_EFD.transpose(1, 2), offs=ends_E)
    y_AD = F.grouped_mm(act(gate_AF) * up_AF, down_EDF.transpose(1, 2), offs=ends_E)
    return without_sentinels(unsort(y_AD, order_A, weights_TK), ids_TK, gate_EFD.shape[0]).to(x_TD.dtype)


def by_load(*, few: ExpertsFunction, many: ExpertsFunction, tokens_per_expert: float = MANY) -> ExpertsFunction:
    """A function that calls `many` if an expert gets at least `tokens_per_expert` tokens on average, else `few`.

    Only shapes decide, so a CUDA graph can capture it.
    """

    def call(
        x_TD: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        product = many if ids_TK.numel() >= tokens_per_expert * gate_EFD.shape[0] else few
        return product(x_TD, gate_EFD, up_EFD, down_EDF, ids_TK, weights_TK)

    return call


def fused_experts(
    x_TD: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """`loop_experts` by Triton kernels."""
    return sum_experts(expert_parts(x_TD, gate_EFD, up_EFD, down_EDF, ids_TK, weights_TK), x_TD.dtype)


@dataclass(frozen=True, kw_only=True)
class ExpertsKernel:
    """The implementation in use. `reasons` has one sentence for every other implementation: why it is not used.

    fused_below  the Triton kernels compute a layer with fewer tokens for each expert; they can return the parts before
                 the sum, with the shared experts among them
    """

    name: str
    call: ExpertsFunction
    fused_below: float = 0.0
    reasons: dict[str, str] = field(default_factory=dict)

    def fuses(self, num_assignments: int, num_experts: int) -> bool:
        """Whether the Triton kernels compute this number of assignments."""
        return num_assignments < self.fused_below * num_experts


def resolve_experts(
    device: torch.device,
    dtype: torch.dtype,
    preference: str | None = None,
    *,
    expert_size: int = 16,
    hidden_size: int = 16,
    capability: tuple[int, int] | None = None,
    has_triton: bool | None = None,
    gelu: bool = False,
) -> ExpertsKernel:
    """The first of triton+grouped (`by_load`), triton, grouped and loop that can serve the setting, or `preference`.

    `expert_size` and `hidden_size` are F and D; their defaults are well-aligned sizes. `gelu`: experts that gate by
    another function than SiLU, which loop and grouped take as `act`. `capability` and `has_triton`
    default to the device's and to what is installed. Raises `ValueError` for an unknown preference, and for a
    preference that the setting rules out, with the reason.
    """
    if has_triton is None:
        has_triton = importlib.util.find_spec("triton") is not None
    if capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    no_triton = _triton_obstacle(device, has_triton)
    if gelu and no_triton is None:
        no_triton = "its kernels gate by SiLU, these experts by GELU"
    no_grouped = _grouped_obstacle(device, dtype, capability) or _alignment_obstacle(dtype, expert_size, hidden_size)
    obstacles = {
        "triton+grouped": no_triton or no_grouped,
        "triton": no_triton,
        "grouped": no_grouped,
        "loop": None,
    }
    calls: dict[str, tuple[ExpertsFunction, float]] = {
        "triton+grouped": (by_load(few=fused_experts, many=grouped_experts), MANY),
        "triton": (fused_experts, math.inf),
        "grouped": (grouped_experts, 0.0),
        "loop": (loop_experts, 0.0),
    }
    if preference is not None and preference not in calls:
        raise ValueError(f"experts={preference!r} is unknown; choose one of {', '.join(calls)}")
    if preference is not None and obstacles[preference] is not None:
        raise ValueError(f"experts={preference!r} cannot be used: {obstacles[preference]}; leave it unset to choose")
    chosen = preference or next(name for name, obstacle in obstacles.items() if obstacle is None)
    reasons = {
        name: obstacle or (f"{chosen} was asked for" if preference else f"{chosen} comes first")
        for name, obstacle in obstacles.items()
        if name != chosen
    }
    call, fused_below = calls[chosen]
    return ExpertsKernel(name=chosen, call=call, fused_below=fused_below, reasons=reasons)


def _triton_obstacle(device: torch.device, has_triton: bool) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, this is {device.type}"
    return None if has_triton else "triton is not installed"


def _grouped_obstacle(device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"torch's grouped matmul does not take {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return None
    if capability is None or capability < (9, 0):
        return "below compute capability 9.0 torch's grouped matmul is a loop that waits for the host"
    return None if dtype == torch.bfloat16 else f"on CUDA it takes bfloat16, not {str(dtype).removeprefix('torch.')}"


def _alignment_obstacle(dtype: torch.dtype, *sizes: int) -> str | None:
    odd = [size for size in sizes if size * dtype.itemsize % 16]
    return f"{odd[0]} channels of {dtype.itemsize} bytes are not a multiple of 16 bytes" if odd else None
