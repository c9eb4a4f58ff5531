"""In which precision a training run computes: bfloat16 on devices with arithmetic for it, float32 on the others."""

from typing import Literal

import torch

from mbd_core.multitf.train_config import Precision


def compute_precision(precision: Precision, device: torch.device) -> Literal["float32", "bfloat16"]:
    """What `precision` means on `device`: `auto` becomes bfloat16 where the device computes it, else float32."""
    if precision == "auto":
        return "bfloat16" if computes_bfloat16(device) else "float32"
    return precision


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 arithmetic. A CPU without it takes up to 100 times as long as in float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
