# mypy: disable-error-code="import-not-found, no-untyped-def"
"""`silu(gate) * up` as one Triton kernel, for the gate and up channels that one product computed side by side.

Shape legend: T tokens, F MLP channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mbd_core.ops.launch import Kernel, launch

_BLOCK = 1024
tl: Any = None  # triton.language, set when a kernel is compiled


def _gated_kernel(gate_up_ptr, out_ptr, F, BLOCK: tl.constexpr):
    """BLOCK channels of one token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < F
    gate = tl.load(gate_up_ptr + token * 2 * F + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * F + F + channel, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * F + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


GATED = Kernel(_gated_kernel)


def gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (T, F) of `gate_up` (T, 2 F), contiguous; computed in float32 and rounded once."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out_TF = gate_up.new_empty(tokens, width)
    launch(GATED, (tokens, -(-width // _BLOCK)), gate_up, out_TF, width, BLOCK=_BLOCK)
    return out_TF
