"""A random layer of experts, and the equation that its output must satisfy."""

import torch
from torch import Tensor
from torch.nn import functional as F

Layer = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def layer(tokens: int, depth: int, width: int, num_experts: int, per_token: int, *, seed: int = 0) -> Layer:
    """x, gate, up, down, ids, weights; experts are drawn from the first two thirds, so that some get no token."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, depth, generator=g)
    gate, up = torch.randn(2, num_experts, width, depth, generator=g) / depth**0.5
    down = torch.randn(num_experts, depth, width, generator=g) / width**0.5
    used = max(per_token, 2 * num_experts // 3)
    ids = torch.rand(tokens, used, generator=g).topk(per_token).indices
    return x, gate, up, down, ids, torch.rand(tokens, per_token, generator=g)


def cut_tiles(ends_E: Tensor, num_assignments: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every tile's expert, first and end row, int32 each, of assignments whose experts' rows end at `ends_E`; surplus
    tiles have end = first."""
    tiles, begin = [], 0
    for expert, end in enumerate(ends_E.tolist()):
        tiles += [(expert, first, min(first + tile, end)) for first in range(begin, end, tile)]
        begin = end
    most = num_assignments // tile + min(len(ends_E), num_assignments)
    assert len(tiles) <= most
    expert, first, end = torch.tensor(tiles + [(0, 0, 0)] * (most - len(tiles)), dtype=torch.int32).view(-1, 3).T
    return expert.contiguous(), first.contiguous(), end.contiguous()


def by_equation(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for e, w in zip(ids[t].tolist(), weights[t], strict=True):
            out[t] += w * (down[e] @ (F.silu(gate[e] @ x[t]) * (up[e] @ x[t])))
    return out
