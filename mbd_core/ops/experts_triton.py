# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Experts in two Triton kernels: gather, both input projections and SwiGLU in one, the output projection in the other.

While decoding, an expert gets a handful of tokens, and the time is that of reading the chosen experts' weights once.
Assignments are sorted by expert and cut into tiles of one expert each (`expert_tiles.py`). The launch has as many
tiles as these shapes can need, so the host reads nothing back; surplus tiles return at once. Weights may be FP8 with a
scale per output channel. They are widened in registers, so that half the bytes are read.

Triton is imported by the first call, so that this file can be imported where Triton is not installed.

Shape legend: T tokens, K experts a token, A = T * K assignments, D model width, E experts, F expert width.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mbd_core.ops.expert_tiles import sorted_tiles
from mbd_core.ops.residual_norm import ExpertParts
from mbd_core.ops.triton_launch import launch


class ExpertTiles(NamedTuple):
    """How both products are cut: `rows` assignments of an expert, `columns` output channels, `depth` channels at a
    time, of which `stages` are on their way."""

    rows: int = 16
    columns: int = 64
    depth: int = 128
    stages: int = 2
    warps: int = 4


DEFAULT_TILES = {1: ExpertTiles(warps=8), 2: ExpertTiles()}
"""By bytes of a weight, where nothing was measured: near vLLM's published choice for 256 experts of width 512 and 64
tokens on an H100; FP8 with more warps, so that no register spills."""
TILES: dict[tuple[int, int, int], ExpertTiles] = {}
"""By (tokens, an expert's width, bytes of a weight), from a sweep on a GPU (`bench/gpu_sections.py`); empty so far."""
tl: Any = None  # triton.language, set by `_compiled` for the kernels


def _swiglu_kernel(
    x_ptr, gate_ptr, up_ptr, gate_scale_ptr, up_scale_ptr, hidden_ptr, order_ptr, expert_ptr, first_ptr, end_ptr,
    D, F, K,
    SCALED: tl.constexpr, TILE: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows `first..end` of one expert: hidden = silu(x gate^T) * (x up^T), for BLOCK_F of its channels."""
    tile = tl.program_id(0)
    first = tl.load(first_ptr + tile)
    end = tl.load(end_ptr + tile)
    if first >= end:
        return
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    rows = first + tl.arange(0, TILE)
    live = rows < end
    tokens = tl.load(order_ptr + rows, mask=live, other=0) // K
    channels = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = channels < F
    gate = tl.zeros((TILE, BLOCK_F), dtype=tl.float32)
    up = tl.zeros((TILE, BLOCK_F), dtype=tl.float32)
    weights = expert * F * D + channels[None, :] * D
    for start in range(0, D, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        deep = depth < D
        x = tl.load(x_ptr + tokens[:, None] * D + depth[None, :], mask=live[:, None] & deep[None, :], other=0.0)
        mask = deep[:, None] & inside[None, :]
        w_gate = tl.load(gate_ptr + weights + depth[:, None], mask=mask, other=0.0).to(x.dtype)
        w_up = tl.load(up_ptr + weights + depth[:, None], mask=mask, other=0.0).to(x.dtype)
        gate = tl.dot(x, w_gate, gate, input_precision="ieee")
        up = tl.dot(x, w_up, up, input_precision="ieee")
    if SCALED:
        gate = gate * tl.load(gate_scale_ptr + expert * F + channels, mask=inside, other=0.0)[None, :]
        up = up * tl.load(up_scale_ptr + expert * F + channels, mask=inside, other=0.0)[None, :]
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    out = hidden_ptr + rows[:, None].to(tl.int64) * F + channels[None, :]
    tl.store(out, hidden.to(hidden_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


def _down_kernel(
    hidden_ptr, down_ptr, down_scale_ptr, weights_ptr, y_ptr, order_ptr, expert_ptr, first_ptr, end_ptr,
    D, F,
    SCALED: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Rows `first..end` of one expert: y = weight * (hidden down^T), stored in the assignments' order, float32."""
    tile = tl.program_id(0)
    first = tl.load(first_ptr + tile)
    end = tl.load(end_ptr + tile)
    if first >= end:
        return
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    rows = first + tl.arange(0, TILE)
    live = rows < end
    assignment = tl.load(order_ptr + rows, mask=live, other=0)
    channels = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = channels < D
    y = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
    weights = expert * D * F + channels[None, :] * F
    for start in range(0, F, BLOCK_F):
        depth = start + tl.arange(0, BLOCK_F)
        deep = depth < F
        source = hidden_ptr + rows[:, None].to(tl.int64) * F + depth[None, :]
        hidden = tl.load(source, mask=live[:, None] & deep[None, :], other=0.0)
        mask = deep[:, None] & inside[None, :]
        w = tl.load(down_ptr + weights + depth[:, None], mask=mask, other=0.0).to(hidden.dtype)
        y = tl.dot(hidden, w, y, input_precision="ieee")
    if SCALED:
        y = y * tl.load(down_scale_ptr + expert * D + channels, mask=inside, other=0.0)[None, :]
    y = y * tl.load(weights_ptr + assignment, mask=live, other=0.0)[:, None]
    tl.store(y_ptr + assignment[:, None] * D + channels[None, :], y, mask=live[:, None] & inside[None, :])


def tiles_for(tokens: int, width: int, weight_bytes: int) -> ExpertTiles:
    """The measured tiles of the least number of tokens that is not below `tokens`, else the default."""
    measured = [n for n, *rest in TILES if n >= tokens and rest == [width, weight_bytes]]
    return TILES[min(measured), width, weight_bytes] if measured else DEFAULT_TILES[min(weight_bytes, 2)]


@functools.cache
def _compiled() -> tuple[Any, Any, Any]:
    """Triton and both kernels, compiled or, where its interpreter is on, interpreted."""
    global tl
    import triton
    import triton.language

    tl = triton.language
    return triton, triton.jit(_swiglu_kernel), triton.jit(_down_kernel)


def too_large() -> type[Exception]:
    """What a call raises whose tiles do not fit into the chip's shared memory."""
    from triton.runtime.errors import OutOfResources

    found: type[Exception] = OutOfResources
    return found


def expert_parts(
    x_TD: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    scales: tuple[Tensor, Tensor, Tensor] | None = None,
    tiles: ExpertTiles | None = None,
) -> ExpertParts:
    """What `experts.loop_experts` sums (T, K, D).

    `scales` are those of FP8 gate (E, F), up (E, F) and down (E, D), float32.

    `tiles` are by default those of `tiles_for`; they change times and rounding.

    Raises `ValueError` for weights that are not contiguous.
    """
    for name, weight in (("gate", gate_EFD), ("up", up_EFD), ("down", down_EDF)):
        if not weight.is_contiguous():
            raise ValueError(f"the {name} weights of shape {tuple(weight.shape)} are not contiguous; copy them first")
    triton, swiglu_kernel, down_kernel = _compiled()
    num_tokens, per_token = ids_TK.shape
    num_experts, width, depth = gate_EFD.shape
    cut = tiles or tiles_for(num_tokens, width, gate_EFD.element_size())
    order_A, expert, first, end = sorted_tiles(ids_TK, num_experts, cut.rows)
    x_TD = x_TD.contiguous()
    hidden_AF = x_TD.new_empty(order_A.shape[0], width)
    y_AD = torch.empty(order_A.shape[0], depth, dtype=torch.float32, device=x_TD.device)
    gate_scale, up_scale, down_scale = scales if scales is not None else (hidden_AF, hidden_AF, hidden_AF)
    options = {"num_warps": cut.warps, "num_stages": cut.stages, "TILE": cut.rows, "SCALED": scales is not None}

    def block(most: int, size: int) -> int:
        return max(16, min(most, int(triton.next_power_of_2(size))))

    block_f, block_d = block(cut.columns, width), block(cut.depth, depth)
    launch(
        swiglu_kernel, (expert.shape[0], triton.cdiv(width, block_f)),
        x_TD, gate_EFD, up_EFD, gate_scale, up_scale, hidden_AF, order_A, expert, first, end,
        depth, width, per_token, BLOCK_F=block_f, BLOCK_D=block_d, **options,
    )  # fmt: skip
    block_f, block_d = block(cut.depth, width), block(cut.columns, depth)
    launch(
        down_kernel, (expert.shape[0], triton.cdiv(depth, block_d)),
        hidden_AF, down_EDF, down_scale, weights_TK.float().contiguous(), y_AD, order_A, expert, first, end,
        depth, width, BLOCK_D=block_d, BLOCK_F=block_f, **options,
    )  # fmt: skip
    return ExpertParts(y_AD.view(num_tokens, per_token, depth), ids_TK, num_experts)
