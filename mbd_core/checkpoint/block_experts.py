"""Experts that keep the FP8 values of a release's files, and a scale for each block, instead of becoming bfloat16.

Nothing is rounded: the stacks hold the files' values, and products multiply by the scales themselves
(`ops/experts/fp8.py`). A tensor-parallel rank holds whole blocks, so its scales are the file's. The other matrices of
such a release are read as bfloat16, because they are small beside the experts.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from mbd_core.checkpoint.block_scales import BlockShape, ScaledMatrix, block_shape
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.safetensor_files import TensorInfo, list_tensors, read_json
from mbd_core.checkpoint.tensors import StoredTensor, match_tensors
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.quantize import check_fp8
from mbd_core.models.shard import split_dim
from mbd_core.ops.experts.fp8 import Fp8Experts, Fp8Weight, empty_weight, fp8_obstacle


def has_blocks(folder: Path) -> bool:
    """Whether the files of a model folder hold FP8 weights with a scale for each block."""
    return block_shape(read_json(folder / "config.json")) is not None


def check_blocks(folder: Path, *, num_ranks: int) -> None:
    """Raises `ValueError` if this number of tensor-parallel ranks would cut the blocks of a folder's experts."""
    config = load_config(folder)
    listed, expected, _ = match_tensors(folder, config, list_tensors(folder))
    find_blocks(folder, config, listed, expected, num_ranks=num_ranks)


def find_blocks(
    folder: Path,
    config: ModelConfig,
    listed: Mapping[str, TensorInfo],
    expected: Mapping[str, StoredTensor],
    *,
    num_ranks: int,
) -> tuple[set[str], BlockShape]:
    """The modules of experts that are FP8 in the files, by the decoder's names, and their blocks.

    Raises `ValueError` if there is none, if a layer's experts are only partly FP8, or if ranks would cut a block.
    """
    check_fp8(config, "blocks")
    if config.moe is None:
        raise ValueError(f"fp8=blocks cannot be honoured: {folder.name} has no experts; fp8=all rounds its layers")
    stored_in: dict[str, dict[bool, str]] = {}
    blocks: BlockShape | None = None
    for name, stored in expected.items():
        for part in stored.parts:
            module, _, stack = part.target.rpartition(".")
            if not module.endswith(".experts") or not stack.endswith("_proj"):
                continue
            scales = listed[name].scales
            stored_in.setdefault(module, {})[scales is not None] = name
            if scales is not None:
                blocks = scales.blocks
                _check_cut(name, part.target, stored.shape, blocks, num_ranks)
    for kinds in stored_in.values():
        if len(kinds) == 2:
            raise ValueError(
                f"fp8=blocks cannot be honoured: '{kinds[True]}' is FP8 and '{kinds[False]}' of the same layer is "
                "not; fp8=experts rounds all of them"
            )
    if blocks is None:
        raise ValueError(
            f"fp8=blocks keeps the FP8 values of files, and the experts of {folder.name} are not FP8; fp8=experts "
            "rounds them"
        )
    return {module for module, kinds in stored_in.items() if True in kinds}, blocks


def _check_cut(name: str, target: str, shape: tuple[int, ...], blocks: BlockShape, num_ranks: int) -> None:
    dim = split_dim(target)
    assert dim is not None and len(shape) == 2
    size, block = shape[dim - 1], blocks[dim - 1]
    if num_ranks > 1 and size // num_ranks % block:
        raise ValueError(
            f"fp8=blocks cannot be honoured with tensor_parallel={num_ranks}: a rank gets {size // num_ranks} of the "
            f"{size} {('rows', 'columns')[dim - 1]} of '{name}', and its scales are for blocks of {block}; take fewer "
            "ranks, or fp8=experts, which rounds each rank's part"
        )


def keep_blocks(model: Decoder, modules: Iterable[str], blocks: BlockShape, device: torch.device | str) -> None:
    """Replaces these expert modules of an empty model by empty FP8 experts. Raises `ValueError` if the device cannot
    multiply them."""
    obstacle = fp8_obstacle(torch.empty((1, 1, 1), device=device), block=blocks)
    if obstacle is not None:
        raise ValueError(f"fp8=blocks cannot be honoured: {obstacle}")
    for name in modules:
        wide = model.get_submodule(name)

        def empty(stack: str, wide: nn.Module = wide) -> Fp8Weight:
            return empty_weight(wide.get_parameter(stack).shape, blocks, "meta")

        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Fp8Experts(empty))


def copy_blocks(
    weights: Mapping[str, Tensor], stack: str, expert: int, where: tuple[slice, ...], source: object
) -> bool:
    """Copies one expert's values and scales into its stack, and returns whether all of them are finite."""
    assert isinstance(source, ScaledMatrix)
    values, scales = source.as_stored(where)
    weights[f"{stack}_values"][expert].copy_(values)
    weights[f"{stack}_scale"][expert].copy_(scales)
    is_nan = values.view(torch.uint8).bitwise_and(0x7F) == 0x7F  # e4m3fn has no infinity
    return not bool(is_nan.any()) and bool(scales.isfinite().all())
