"""Loads the weights of a model folder; experts may keep the FP8 values of a release's files.

The files must hold exactly the model's tensors in their shapes; otherwise loading is an error, and no weight stays
random. The files' headers are checked before any weight is read. Weights stream from the files into their final place,
so the peak memory is the model and one tensor. A weight that is NaN or infinite is refused when it is read.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.safetensor_files import (
    DTYPES,
    METADATA,
    BlockShape,
    LastFile,
    ScaledMatrix,
    TensorInfo,
    block_shape,
    list_tensors,
    matrix_slice,
    open_file,
    read_json,
)
from mbd_core.checkpoint.tensors import FLOAT32_ALWAYS, StoredTensor, match_tensors
from mbd_core.models.decoder import Decoder
from mbd_core.models.layer_parts import Reduce
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import check_fp8, quantize_weights, rounded_bytes, weight_bytes
from mbd_core.models.shard import Shard, served_dim, split_dim
from mbd_core.ops.experts.fp8 import Fp8Experts, Fp8Weight, empty_weight, fp8_obstacle

# Experts that keep the FP8 values of a release's files, and a scale for each block, instead of becoming bfloat16.
#
# Nothing is rounded: the stacks hold what the files hold, and products multiply by the scales themselves
# (`ops/fp8.py`). A tensor-parallel rank holds whole blocks, so that its scales are the file's. The other matrices of
# such a release are read as bfloat16: they are few bytes beside a mixture's experts.


def has_blocks(folder: Path) -> bool:
    """Whether the files of a model folder hold FP8 weights with a scale for each block."""
    return block_shape(read_json(folder / "config.json")) is not None


def check_blocks(folder: Path, *, num_ranks: int) -> None:
    """Raise `ValueError` for a folder whose experts cannot keep their blocks among so many tensor-parallel ranks."""
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

    Raises `ValueError` if there is none, if a layer's experts are only partly FP8, and if ranks would cut a block.
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
    """Give a model without values these experts in FP8, to be filled. Raises `ValueError` for a device that cannot
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
    """Copy one expert's values and scales into its stack; whether all of them are finite."""
    assert isinstance(source, ScaledMatrix)
    values, scales = source.as_stored(where)
    weights[f"{stack}_values"][expert].copy_(values)
    weights[f"{stack}_scale"][expert].copy_(scales)
    is_nan = values.view(torch.uint8).bitwise_and(0x7F) == 0x7F  # e4m3fn has no infinity
    return not bool(is_nan.any()) and bool(scales.isfinite().all())


_OWN_DTYPE = (*FLOAT32_ALWAYS, "_values", "_scale")
"""Endings of the names of tensors that are never cast: those of FP8 weights are the last two."""


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    shard: Shard | None = None,
    reduce: Reduce | None = None,
    fp8: Fp8Parts | None = None,
) -> Decoder:
    """The model of a checkpoint folder, in evaluation mode; raises `ValueError` naming the file and the tensor.

    Without `dtype` the weights keep their dtype; if a checkpoint mixes dtypes, they get the one that config.json
    names. The router's `expert_bias` is always float32. With a `shard`, only that tensor-parallel rank's slices are
    read, and `reduce` must sum over the ranks (see `Decoder`). `fp8` are the weights to be rounded to FP8
    (`quantize_weights`); "blocks" are not rounded but keep what FP8 files hold (`loading.py`).
    """
    refuse_dcp(folder)
    config = load_config(folder)
    with torch.device("meta"):
        model = Decoder(config, shard=shard, reduce=reduce)
    listed, expected, _ = match_tensors(folder, config, list_tensors(folder))
    common = dtype or _stored_dtype(folder, listed)
    if fp8 == "blocks":
        modules, blocks = find_blocks(folder, config, listed, expected, num_ranks=model.shard.size)
        keep_blocks(model, modules, blocks, device)
    weights = {
        name: torch.empty(t.shape, dtype=t.dtype if name.endswith(_OWN_DTYPE) else common, device=device)
        for name, t in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    for path, names in itertools.groupby(listed, key=lambda name: listed[name].path):
        with open_file(path) as file, LastFile() as scales:
            for name in names:
                source = matrix_slice(file, name, listed[name], scales)
                unfit = _copy_in(weights, source, expected[name], model.shard)
                if unfit is not None:
                    kind = str(unfit).removeprefix("torch.")
                    raise ValueError(f"{path}: tensor '{name}' has values that are not finite in {kind}")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval() if fp8 in (None, "blocks") else quantize_weights(model.eval(), fp8)


def planned_bytes(config: ModelConfig, dtype: torch.dtype, *, fp8: Fp8Parts | None = None, num_ranks: int = 1) -> int:
    """Bytes of the weights that `load_model` gives rank 0 of a model in `dtype`; nothing is read."""
    with torch.device("meta"):
        model = Decoder(config, shard=Shard(size=num_ranks)).to(dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(FLOAT32_ALWAYS):
            tensor.data = tensor.data.float()
    return weight_bytes(model) if fp8 is None else rounded_bytes(model, fp8)


def empty_model(folder: Path) -> Decoder:
    """The model of a checkpoint folder on the meta device, in float32: its shapes without values."""
    refuse_dcp(folder)
    with torch.device("meta"):
        return Decoder(load_config(folder))


def fill_parts(state: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> None:
    """Fill a model's tensors, which may be cut among workers, from a checkpoint folder of its shapes.

    Each worker reads its own parts alone. Raises `ValueError` as `load_model` does.
    """
    infos, stored, _ = match_tensors(folder, config, list_tensors(folder))
    for path, names in itertools.groupby(infos, key=lambda name: infos[name].path):
        with open_file(path) as file, LastFile() as scales:
            for name in names:
                for place in _copy_own(state, matrix_slice(file, name, infos[name], scales), stored[name]):
                    if not _is_finite(place):
                        raise ValueError(f"{path}: tensor '{name}' has values that are not finite")


def _copy_own(state: Mapping[str, Tensor], source: Any, stored: StoredTensor) -> Iterator[Tensor]:
    """Copy what this worker has of a stored tensor into its parts; yields what was filled."""
    start = 0
    for part, length in zip(stored.parts, stored.lengths, strict=True):
        offsets, own_rows = _own_place(state[part.target].detach())
        if part.expert is not None:
            number, offsets = part.expert - offsets[0], offsets[1:]
            own_rows = own_rows[number] if 0 <= number < len(own_rows) else own_rows[:0]
        if own_rows.numel():
            where = [slice(at, at + size) for at, size in zip(offsets, own_rows.shape, strict=True)]
            where[stored.dim] = slice(start + where[stored.dim].start, start + where[stored.dim].stop)
            own_rows.copy_(source[tuple(where)])
            yield own_rows
        start += length


def _own_place(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Where this worker's part of a tensor begins, and the part."""
    # imported here because it takes a second, which every process that serves would wait for
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tensor
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tensor.to_local()


def refuse_dcp(folder: Path) -> None:
    """Raise `ValueError` for a distributed checkpoint where a Hugging Face folder is needed."""
    if (folder / METADATA).exists():
        raise ValueError(
            f"{folder} is a distributed checkpoint; make a model folder of it with "
            "jobs/convert_checkpoint.py --format hf"
        )


def _stored_dtype(folder: Path, listed: dict[str, TensorInfo]) -> torch.dtype:
    """The dtype of the weights; if the files have several, config.json's `dtype` or `torch_dtype`."""
    dtypes = {info.dtype for name, info in listed.items() if not name.endswith(FLOAT32_ALWAYS)}
    if len(dtypes) == 1:
        return dtypes.pop()
    config = read_json(folder / "config.json")
    name = config.get("dtype") or config.get("torch_dtype")
    dtype = next((d for d in DTYPES.values() if str(d) == f"torch.{name}" or str(d) == name), None)
    if dtype is None:
        raise ValueError(f"{folder} holds weights of several dtypes and config.json's dtype is {name!r}; ask for one")
    return dtype


def _is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity. A NaN makes both its least and greatest value NaN."""
    low, high = tensor.aminmax()
    return math.isfinite(low) and math.isfinite(high)


def _copy_in(weights: dict[str, Tensor], source: Any, stored: StoredTensor, shard: Shard) -> torch.dtype | None:
    """Copy a stored tensor's parts, or this rank's slices of them, into the model; the dtype in which a value is not
    finite, `None` if all are."""
    start, unfit = 0, None
    for part, length in zip(stored.parts, stored.lengths, strict=True):
        is_quantized = part.target not in weights
        target = weights[f"{part.target}_values" if is_quantized else part.target]
        target = target if part.expert is None else target[part.expert]
        where = [slice(None)] * len(stored.shape)
        where[stored.dim] = slice(start, start + length)
        dim = served_dim(part.target)
        if shard.size > 1 and dim is not None:
            dim -= part.expert is not None
            own_range = shard.part(length if dim == stored.dim else stored.shape[dim])
            begin = start if dim == stored.dim else 0
            where[dim] = slice(begin + own_range.start, begin + own_range.stop)
        if is_quantized:
            assert part.expert is not None
            finite = copy_blocks(weights, part.target, part.expert, tuple(where), source)
        else:
            target.copy_(source[tuple(where)])
            finite = _is_finite(target)
        unfit = unfit if finite else target.dtype
        start += length
    return unfit
