"""How fast a device multiplies matrices, measured."""

import torch

from mbd_core.ops.call_timing import best_seconds


def measure_flops(device: torch.device, dtype: torch.dtype, *, size: int | None = None, repeats: int = 5) -> float:
    """Floating-point operations a second of a square matrix product, by default 8192 wide on CUDA, 1024 elsewhere."""
    if size is None:
        size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / best_seconds(lambda: torch.mm(a, b, out=out), device, repeats)
