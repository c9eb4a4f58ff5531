# mypy: disable-error-code="import-not-found, no-untyped-def"
"""Experts in two Triton kernels: gather, both input projections and SwiGLU in one, the output projection in the other.

While decoding, an expert gets a handful of tokens, and the time goes into reading the chosen experts' weights once.
Assignments are sorted by expert and cut into tiles of one expert each (`expert_tiles.py`). The launch has the largest
number of tiles that these shapes can need, so the host reads nothing back; surplus tiles return at once. Shared
experts are experts like the others: each gets all tokens with weight 1, so their SwiGLU needs no kernel of its own.

Weights may be FP8, with a scale per output channel or per block of a matrix. They are widened in registers, which is
exact, and each partial product is multiplied by its scale in float32: half the bytes are read, and the inputs keep
their dtype. Rounding the inputs too would save few bytes, and cost a kernel and accuracy.

Shape legend: T tokens, K experts a token, A = T * K assignments, D model width, E experts, F expert width, S shared
experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mbd_core.ops.experts.expert_tiles import sorted_tiles
from mbd_core.ops.launch import Kernel, launch, power_of_two
from mbd_core.ops.layer.residual_norm import ExpertParts


class ExpertTiles(NamedTuple):
    """The tile sizes of both products: `rows` assignments of an expert, `columns` output channels, `depth` input
    channels at a time.

    `stages` steps of `depth` channels are in flight.
    """

    rows: int = 16
    columns: int = 64
    depth: int = 128
    stages: int = 2
    warps: int = 4


DEFAULT_TILES = {1: ExpertTiles(warps=8, stages=3), 2: ExpertTiles()}
"""The unmeasured default by bytes of a weight. It is near vLLM's published choice for 256 experts of width 512 and 64
tokens on an H100. FP8 has more warps, so that no register spills, and one more stage, because fewer programs fit
beside each other."""
MOST_PARTS = 4
"""The largest number of partial products of the output projection; with more, a program waits more than it reads."""
FULL, FULL_ROWS = 16, 64
"""If an expert gets `FULL` tokens or more, default tiles have `FULL_ROWS` rows, so that a prompt reads the weights
fewer times."""
LEAST_DEPTH = 16
"""The least number of input channels of a partial product: the depth of one instruction of the chip."""
TILES: dict[tuple[int, int, int], ExpertTiles] = {}
"""Tiles by (tokens, an expert's width, bytes of a weight), from a sweep on a GPU (`benchmarks/gpu`). It is empty
because an H100 gained little by it."""
tl: Any = None  # triton.language, set when a kernel is compiled


class SharedExperts(NamedTuple):
    """The shared experts as one SwiGLU: gate and up (S * F, D), down (D, S * F); contiguous."""

    gate: Tensor
    up: Tensor
    down: Tensor


class Scales(NamedTuple):
    """The scales of FP8 gate, up and down, float32: (E, output channels / rows, input channels / columns), rounded up.

    A scale covers `rows` x `columns` weights of an expert, all input channels if `columns` is 0.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    rows: int = 1
    columns: int = 0


def _gate_up(
    x_ptr,
    gate_ptr,
    up_ptr,
    gate_scale_ptr,
    up_scale_ptr,
    tokens,
    live,
    channels,
    D,
    F,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """x gate^T and x up^T of one expert. All pointers but the first point at this expert's weights and scales."""
    inside = channels < F
    gate = tl.zeros((TILE, BLOCK_F), dtype=tl.float32)
    up = tl.zeros((TILE, BLOCK_F), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        depth = start + tl.arange(0, BLOCK_D)
        deep = depth < D
        x = tl.load(x_ptr + tokens[:, None] * D + depth[None, :], mask=live[:, None] & deep[None, :], other=0.0)
        mask = deep[:, None] & inside[None, :]
        w_gate = tl.load(gate_ptr + channels[None, :] * D + depth[:, None], mask=mask, other=0.0)
        w_up = tl.load(up_ptr + channels[None, :] * D + depth[:, None], mask=mask, other=0.0)
        if ROWS > 0:  # by way of float16, which is exact: to bfloat16 Hopper converts one number at a time, and slowly
            w_gate = w_gate.to(tl.float16).to(tl.float32).to(x.dtype)
            w_up = w_up.to(tl.float16).to(tl.float32).to(x.dtype)
        if COLUMNS > 0:
            at = channels // ROWS * ((D + COLUMNS - 1) // COLUMNS) + start // COLUMNS
            by_gate = tl.load(gate_scale_ptr + at, mask=inside, other=0.0)
            by_up = tl.load(up_scale_ptr + at, mask=inside, other=0.0)
            gate += tl.dot(x, w_gate, input_precision="ieee") * by_gate[None, :]
            up += tl.dot(x, w_up, input_precision="ieee") * by_up[None, :]
        else:
            gate = tl.dot(x, w_gate, gate, input_precision="ieee")
            up = tl.dot(x, w_up, up, input_precision="ieee")
    if ROWS > 0 and COLUMNS == 0:
        gate = gate * tl.load(gate_scale_ptr + channels // ROWS, mask=inside, other=0.0)[None, :]
        up = up * tl.load(up_scale_ptr + channels // ROWS, mask=inside, other=0.0)[None, :]
    return gate, up


def _swiglu_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    gate_scale_ptr,
    up_scale_ptr,
    shared_gate_ptr,
    shared_up_ptr,
    hidden_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    D,
    F,
    E,
    K,
    num_scales,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows `first..end` of one expert: hidden = silu(x gate^T) * (x up^T), for BLOCK_F of its channels.

    `num_scales` is the number of scales of one expert's matrix.
    """
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
    gate = tl.zeros((TILE, BLOCK_F), dtype=tl.float32)
    up = tl.zeros((TILE, BLOCK_F), dtype=tl.float32)
    if ROWS == 0:  # one loop for both kinds of experts: two loops would each take a part of the shared memory
        gate_ptr += expert * F * D
        up_ptr += expert * F * D
        if SHARES and expert >= E:
            gate_ptr = shared_gate_ptr + (expert - E) * F * D
            up_ptr = shared_up_ptr + (expert - E) * F * D
        gate, up = _gate_up(
            x_ptr,
            gate_ptr,
            up_ptr,
            gate_scale_ptr,
            up_scale_ptr,
            tokens,
            live,
            channels,
            D,
            F,
            0,
            0,
            TILE,
            BLOCK_F,
            BLOCK_D,
        )
    elif SHARES and expert >= E:
        place = (expert - E) * F * D
        gate, up = _gate_up(
            x_ptr,
            shared_gate_ptr + place,
            shared_up_ptr + place,
            gate_scale_ptr,
            up_scale_ptr,
            tokens,
            live,
            channels,
            D,
            F,
            0,
            0,
            TILE,
            BLOCK_F,
            BLOCK_D,
        )
    else:
        place, scales = expert * F * D, expert * num_scales
        gate, up = _gate_up(
            x_ptr,
            gate_ptr + place,
            up_ptr + place,
            gate_scale_ptr + scales,
            up_scale_ptr + scales,
            tokens,
            live,
            channels,
            D,
            F,
            ROWS,
            COLUMNS,
            TILE,
            BLOCK_F,
            BLOCK_D,
        )
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    out = hidden_ptr + rows[:, None].to(tl.int64) * F + channels[None, :]
    tl.store(out, hidden.to(hidden_ptr.dtype.element_ty), mask=live[:, None] & (channels < F)[None, :])


def _down(
    hidden_ptr,
    down_ptr,
    scale_ptr,
    rows,
    live,
    channels,
    D,
    F,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """hidden down^T of an expert. `down_ptr` and `scale_ptr` point at this expert's weights and scales. Rows of down
    are `stride` apart."""
    inside = channels < D
    y = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        depth = start + tl.arange(0, BLOCK_F)
        deep = depth < F
        source = hidden_ptr + rows[:, None].to(tl.int64) * F + depth[None, :]
        hidden = tl.load(source, mask=live[:, None] & deep[None, :], other=0.0)
        mask = deep[:, None] & inside[None, :]
        w = tl.load(down_ptr + channels[None, :] * stride + depth[:, None], mask=mask, other=0.0)
        if ROWS > 0:
            w = w.to(tl.float16).to(tl.float32).to(hidden.dtype)
        if COLUMNS > 0:
            at = channels // ROWS * ((F + COLUMNS - 1) // COLUMNS) + start // COLUMNS
            by = tl.load(scale_ptr + at, mask=inside, other=0.0)
            y += tl.dot(hidden, w, input_precision="ieee") * by[None, :]
        else:
            y = tl.dot(hidden, w, y, input_precision="ieee")
    if ROWS > 0 and COLUMNS == 0:
        y = y * tl.load(scale_ptr + channels // ROWS, mask=inside, other=0.0)[None, :]
    return y


def _down_kernel(
    hidden_ptr,
    down_ptr,
    down_scale_ptr,
    shared_down_ptr,
    weights_ptr,
    y_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    D,
    F,
    E,
    wide,
    num_scales,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Rows `first..end` of one expert: y = weight * (hidden down^T), stored in the assignments' order, float32.

    `wide` are the channels of all shared experts together, `num_scales` the scales of one expert's matrix.
    """
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
    y = tl.zeros((TILE, BLOCK_D), dtype=tl.float32)
    if ROWS == 0:
        down_ptr += expert * D * F
        stride = F
        if SHARES and expert >= E:
            down_ptr = shared_down_ptr + (expert - E) * F
            stride = wide
        y = _down(
            hidden_ptr, down_ptr, down_scale_ptr, rows, live, channels, D, F, stride, 0, 0, TILE, BLOCK_D, BLOCK_F
        )
    elif SHARES and expert >= E:
        place = shared_down_ptr + (expert - E) * F
        y = _down(hidden_ptr, place, down_scale_ptr, rows, live, channels, D, F, wide, 0, 0, TILE, BLOCK_D, BLOCK_F)
    else:
        scales = down_scale_ptr + expert * num_scales
        y = _down(
            hidden_ptr,
            down_ptr + expert * D * F,
            scales,
            rows,
            live,
            channels,
            D,
            F,
            F,
            ROWS,
            COLUMNS,
            TILE,
            BLOCK_D,
            BLOCK_F,
        )
    y = y * tl.load(weights_ptr + assignment, mask=live, other=0.0)[:, None]
    tl.store(y_ptr + assignment[:, None] * D + channels[None, :], y, mask=live[:, None] & (channels < D)[None, :])


def tiles_for(tokens: int, width: int, weight_bytes: int, *, each: float = 1.0) -> ExpertTiles:
    """The measured tiles of the least number of tokens at or above `tokens`.

    If none were measured, the default tiles; `each` is the mean number of tokens an expert.
    """
    measured_counts = [n for n, *rest in TILES if n >= tokens and rest == [width, weight_bytes]]
    if measured_counts:
        return TILES[min(measured_counts), width, weight_bytes]
    default = DEFAULT_TILES[min(weight_bytes, 2)]
    return default if each < FULL else default._replace(rows=FULL_ROWS)


def down_depth(cut: ExpertTiles, width: int, columns: int) -> int:
    """Channels of an expert that the output projection takes at a time; `columns` is the width of a block of
    scales."""
    least = -(-width // MOST_PARTS)
    return _within(columns, max(16, min(max(cut.depth, power_of_two(least)), power_of_two(width))))


SWIGLU = Kernel(_swiglu_kernel, parts=(_gate_up,))
DOWN = Kernel(_down_kernel, parts=(_down,))


def too_large() -> type[Exception]:
    """The exception of a call whose tiles do not fit into the chip's shared memory."""
    from triton.runtime.errors import OutOfResources

    error: type[Exception] = OutOfResources
    return error


def expert_parts(
    x_TD: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    scales: Scales | None = None,
    shared: SharedExperts | None = None,
    tiles: ExpertTiles | None = None,
) -> ExpertParts:
    """The terms (T, K, D) of `experts.loop_experts`'s sum.

    `scales` are FP8 stacks' scales. The ids E to E + S - 1 are the `shared` experts, in the dtype of `x_TD`; the next
    id is no expert. `tiles` default to those of `tiles_for`; other tiles change speed and rounding. Raises
    `ValueError` for weights that are not contiguous, and for blocks of scales that no tile size fits.
    """
    for name, weight in (*zip(("gate", "up", "down"), (gate_EFD, up_EFD, down_EDF), strict=True), *_named(shared)):
        if not weight.is_contiguous():
            raise ValueError(f"the {name} weights of shape {tuple(weight.shape)} are not contiguous; copy them first")
    num_tokens, per_token = ids_TK.shape
    num_experts, width, depth = gate_EFD.shape
    num_ids = num_experts + (0 if shared is None else shared.gate.shape[0] // width)
    cut = tiles or tiles_for(num_tokens, width, gate_EFD.element_size(), each=ids_TK.numel() / num_experts)
    order_A, expert, first, end = sorted_tiles(ids_TK, num_ids, cut.rows)
    x_TD = x_TD.contiguous()
    hidden_AF = x_TD.new_empty(order_A.shape[0], width)
    y_AD = torch.empty(order_A.shape[0], depth, dtype=torch.float32, device=x_TD.device)
    gate_scale, up_scale, down_scale, rows, columns = scales or Scales(hidden_AF, hidden_AF, hidden_AF, rows=0)
    shared_gate, shared_up, shared_down = shared or SharedExperts(x_TD, x_TD, x_TD)
    options = {
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        "TILE": cut.rows,
        "SHARES": shared is not None,
        "ROWS": rows,
        "COLUMNS": columns,
    }

    def block(most: int, size: int) -> int:
        return max(16, min(most, power_of_two(size)))

    block_f, block_d = block(cut.columns, width), _within(columns, block(cut.depth, depth))
    launch(
        SWIGLU,
        (expert.shape[0], -(-width // block_f)),
        x_TD,
        gate_EFD,
        up_EFD,
        gate_scale,
        up_scale,
        shared_gate,
        shared_up,
        hidden_AF,
        order_A,
        expert,
        first,
        end,
        depth,
        width,
        num_experts,
        per_token,
        _each(gate_scale, rows),
        BLOCK_F=block_f,
        BLOCK_D=block_d,
        **options,
    )
    block_f, block_d = down_depth(cut, width, columns), block(cut.columns, depth)
    launch(
        DOWN,
        (expert.shape[0], -(-depth // block_d)),
        hidden_AF,
        down_EDF,
        down_scale,
        shared_down,
        weights_TK.float().contiguous(),
        y_AD,
        order_A,
        expert,
        first,
        end,
        depth,
        width,
        num_experts,
        shared_down.shape[-1],
        _each(down_scale, rows),
        BLOCK_D=block_d,
        BLOCK_F=block_f,
        **options,
    )
    return ExpertParts(y_AD.view(num_tokens, per_token, depth), ids_TK, num_ids)


def _named(shared: SharedExperts | None) -> list[tuple[str, Tensor]]:
    return [] if shared is None else [(f"shared {name}", weight) for name, weight in shared._asdict().items()]


def _each(scale: Tensor, rows: int) -> int:
    """Scales of one expert's matrix."""
    return scale[0].numel() if rows else 0


def _within(columns: int, depth: int) -> int:
    """The depth of a partial product that lies within one block of scales: `depth`, a power of two, or less."""
    while columns and columns % depth:
        depth //= 2
    if depth < LEAST_DEPTH:
        raise ValueError(
            f"FP8 blocks of {columns} input channels cannot be multiplied: the kernels take blocks of a multiple of "
            f"{LEAST_DEPTH}"
        )
    return depth
