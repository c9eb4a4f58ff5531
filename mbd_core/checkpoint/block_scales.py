"""FP8 weights as models are released: a float8 matrix, and `..._scale_inv` with a factor for each of its blocks.

`weight[i, j] = stored[i, j] * weight_scale_inv[i // R, j // C]`, with blocks of R x C from config.json's
`quantization_config` (128 x 128 in the releases). A model keeps the products in bfloat16. `models/quantize.py` may
round them again for computing in FP8. Experts can also keep the stored values and scales (`block_experts.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mbd_core.ops.experts.fp8 import BlockShape

FP8 = "F8_E4M3"
SUFFIX = "_scale_inv"
READ_AS = torch.bfloat16
"""The dtype of the products: the released models compute in it what they do not compute in FP8."""
# Keys about the rounding of activations in FP8 products, and keys that the tensors' dtypes already show.
HARMLESS = ("activation_scheme", "dequantize", "fmt", "ignored_layers", "modules_to_not_convert", "scale_fmt")
KNOWN_KEYS = ("quant_method", "weight_block_size", *HARMLESS)


def block_shape(config: Mapping[str, Any]) -> BlockShape | None:
    """The size of the blocks by a parsed config.json, `None` for weights that are not quantized.

    Raises `ValueError` for any quantization but FP8 in blocks.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    blocks = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    whole = isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
    if method != "fp8" or not whole:
        raise ValueError(
            f"config.json has a quantization_config with quant_method={method!r} and weight_block_size={blocks!r}; "
            "only fp8 with two block sizes is read; take a release whose weights are not quantized"
        )
    assert isinstance(quantization, dict) and isinstance(blocks, list)
    for key, value in quantization.items():
        if value is not None and key not in KNOWN_KEYS:
            raise ValueError(
                f"config.json has {key}={value!r} in quantization_config, which is not known; take a release without "
                "it, or remove the key if the weights mean the same without it"
            )
    return blocks[0], blocks[1]


def scales_shape(shape: tuple[int, ...], blocks: BlockShape) -> tuple[int, ...]:
    """The shape of a matrix's scales. The last blocks may be smaller than the others."""
    return tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix in a file: `stored`, a safetensors slice of float8, times its scales. Slicing it reads a part."""

    stored: Any
    scales: Tensor
    blocks: BlockShape

    def __getitem__(self, where: slice | tuple[slice, ...]) -> Tensor:
        """Rows and columns of the product, in float32."""
        ranges = self._ranges(where)
        rows, columns = (
            torch.arange(span.start, span.stop) // block for span, block in zip(ranges, self.blocks, strict=True)
        )
        part = self.stored[tuple(slice(span.start, span.stop) for span in ranges)]
        return part.to(torch.float32) * self.scales.to(torch.float32)[rows][:, columns]

    def as_stored(self, where: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """The float8 values of rows and columns that begin at block bounds, and their blocks' scales, float32."""
        ranges = self._ranges(where)
        assert all(span.start % block == 0 for span, block in zip(ranges, self.blocks, strict=True))
        rows, columns = (
            slice(span.start // block, -(-span.stop // block)) for span, block in zip(ranges, self.blocks, strict=True)
        )
        values = self.stored[tuple(slice(span.start, span.stop) for span in ranges)]
        return values, self.scales.to(torch.float32)[rows, columns]

    def _ranges(self, where: slice | tuple[slice, ...]) -> list[range]:
        slices = where if isinstance(where, tuple) else (where,)
        return [range(size)[part] for size, part in zip(self.stored.get_shape(), (*slices, slice(None)), strict=False)]
