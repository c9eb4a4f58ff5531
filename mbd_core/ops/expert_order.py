"""A layer's assignments of tokens to experts, sorted by expert and back.

Shape legend: T tokens, K experts a token, A = T * K assignments, D model width, E experts.
"""

import torch
from torch import Tensor


def sort_by_expert(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Assignments sorted by expert (A,), and where each expert's assignments end (E,), int32; no host reads.

    Assignments to the sentinel E, which is no expert, stand last, behind all ends.
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
    """`out_TD` with zeros for the tokens that go to no expert, whose sums are of memory that nobody wrote."""
    return torch.where(ids_TK[:, :1] < num_experts, out_TD, 0.0)
