"""Loads the weights of a model folder into a decoder.

The files must hold exactly the model's tensors in their shapes; otherwise loading is an error, and no weight stays
random. The files' headers are checked before any weight is read. Weights stream from the files into their final place,
so the peak memory is the model and one tensor, or four that come from a URL. A model that is rounded is read and
rounded layer by layer, so it never lies in memory wide. A NaN or infinite weight is refused when it is read.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mbd_core.checkpoint.block_experts import copy_blocks, find_blocks, keep_blocks
from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.safetensor_files import (
    DTYPES,
    METADATA,
    LastFile,
    TensorInfo,
    list_tensors,
    matrix_slice,
    open_file,
    read_json,
)
from mbd_core.checkpoint.streamed_tensors import many_at_once
from mbd_core.checkpoint.tensors import FLOAT32_ALWAYS, StoredTensor, match_tensors
from mbd_core.models.decoder import Decoder
from mbd_core.models.layer_parts import Reduce
from mbd_core.models.model_config import Fp8Parts, ModelConfig
from mbd_core.models.quantize import fp8_names, quantize_weights, round_to_int8, rounded_bytes, weight_bytes
from mbd_core.models.shard import Shard, served_dim

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_OWN_DTYPE = (*FLOAT32_ALWAYS, "_values", "_scale")
"""Name endings of tensors that are never cast. The last two belong to FP8 weights."""
OUTSIDE = -1
"""In place of a layer's number: what lies in no layer, or a whole model that is not rounded."""
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    shard: Shard | None = None,
    reduce: Reduce | None = None,
    fp8: Fp8Parts | None = None,
) -> Decoder:
    """The model of a checkpoint folder, in evaluation mode. Raises `ValueError` naming the file and the tensor.

    Without `dtype` the weights keep their dtype; if a checkpoint mixes dtypes, config.json's counts. The router's
    `expert_bias` is always float32. With a `shard`, only that tensor-parallel rank's slices are read, and `reduce`
    must sum over the ranks (see `Decoder`). With `torch.int8` all products are rounded to int8, and the rest is
    float32 (`round_to_int8`). `fp8` chooses the weights to round to FP8 (`quantize_weights`). "blocks"
    rounds nothing and keeps the files' FP8 values (`block_experts.py`).
    """
    if dtype == torch.int8 and fp8 is not None:
        raise ValueError(f"fp8={fp8} cannot be honoured with dtype=int8: leave one of them out")
    refuse_dcp(folder)
    config = load_config(folder)
    with torch.device("meta"):
        model = Decoder(config, shard=shard, reduce=reduce)
    listed, expected, _ = match_tensors(folder, config, list_tensors(folder))
    common = torch.float32 if dtype == torch.int8 else dtype or weights_dtype(folder, listed)
    if fp8 == "blocks":
        modules, blocks = find_blocks(folder, config, listed, expected, num_ranks=model.shard.size)
        keep_blocks(model, modules, blocks, device)
    rounds = dtype == torch.int8 or fp8 in ("experts", "all")
    if fp8 in ("experts", "all"):
        fp8_names(model, fp8)  # says what is wrong with `fp8` before weights are read
    places = {
        name: (t.shape, t.dtype if name.endswith(_OWN_DTYPE) else common)
        for name, t in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }

    def layer_of(target: str) -> int:
        match = _OF_LAYER.match(target) if rounds else None
        return OUTSIDE if match is None else int(match[1])

    for layer in range(OUTSIDE, config.num_layers if rounds else 0):
        own = {name: place for name, place in places.items() if layer_of(name) == layer}
        weights = {name: torch.empty(shape, dtype=kind, device=device) for name, (shape, kind) in own.items()}
        names = [name for name in listed if layer_of(expected[name].parts[0].target) == layer]
        _fill(weights, {name: listed[name] for name in names}, expected, model.shard)
        if layer == OUTSIDE and config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights, strict=not rounds, assign=True)
        weights.clear()  # what is rounded is freed
        if layer != OUTSIDE:
            _round(model, dtype, fp8, layer)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return round_to_int8(model.eval()) if dtype == torch.int8 else model.eval()


def _round(model: Decoder, dtype: torch.dtype | None, fp8: Fp8Parts | None, layer: int) -> None:
    """Rounds one layer, which is in its place, as `load_model` says."""
    if dtype == torch.int8:
        round_to_int8(model, layer)
    else:
        assert fp8 is not None
        quantize_weights(model, fp8, layer)


def _fill(
    weights: dict[str, Tensor], listed: Mapping[str, TensorInfo], expected: Mapping[str, StoredTensor], shard: Shard
) -> None:
    """Reads the checkpoint's tensors `listed` into the decoder's `weights`."""

    def copy(name: str, source: Any) -> None:
        unfit = _copy_in(weights, source, expected[name], shard)
        if unfit is not None:
            kind = str(unfit).removeprefix("torch.")
            raise ValueError(f"{listed[name].path}: tensor '{name}' has values that are not finite in {kind}")

    for path, in_file in itertools.groupby(listed, key=lambda name: listed[name].path):
        names = list(in_file)
        with (
            open_file(path) as file,
            LastFile() as scales,
            many_at_once(file, len(names), quiet=shard.rank != 0) as map_all,
        ):
            sources = (matrix_slice(file, name, listed[name], scales) for name in names)
            for _ in map_all(copy, names, sources):
                pass


def planned_bytes(config: ModelConfig, dtype: torch.dtype, *, fp8: Fp8Parts | None = None, num_ranks: int = 1) -> int:
    """Bytes of the weights that `load_model` gives rank 0 of a model in `dtype`, without reading any."""
    with torch.device("meta"):
        model = Decoder(config, shard=Shard(size=num_ranks)).to(torch.float32 if dtype == torch.int8 else dtype)
        if dtype == torch.int8:
            return weight_bytes(round_to_int8(model))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(FLOAT32_ALWAYS):
            tensor.data = tensor.data.float()
    return weight_bytes(model) if fp8 is None else rounded_bytes(model, fp8)


def fill_parts(state: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> None:
    """Fills a model's tensors, which may be cut among workers, from a checkpoint folder of its shapes.

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
    """Copies this worker's share of a stored tensor into its parts; yields the filled parts."""
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
    """The offset of this worker's part of a tensor, and the part."""
    # Imported here, because the import takes a second and not every serving process needs it.
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
            f"{folder} is a distributed checkpoint; make a model folder of it with mbd convert DIR --to hf --out OUT"
        )


def refuse_adapter_beside(folder: Path) -> None:
    """Raise `ValueError` for a model folder that holds an adapter too: transformers' model there is both."""
    if all((folder / name).is_file() for name in ADAPTER_FILES):
        raise ValueError(
            f"{folder} holds a model and an adapter ({ADAPTER_FILES[0]}); merge them with mbd convert {folder} "
            f"--adapter {folder} --out DIR, or move the adapter to a folder of its own"
        )


def weights_dtype(folder: Path, listed: dict[str, TensorInfo] | None = None) -> torch.dtype:
    """The dtype in which a folder's weights are loaded by default: its files' dtype; if the files have several,
    config.json's `dtype` or `torch_dtype`. Raises `ValueError` if neither says it."""
    listed = list_tensors(folder) if listed is None else listed
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
    """Whether a tensor has neither NaN nor infinity. A NaN makes both its least and its greatest value NaN."""
    low, high = tensor.aminmax()
    return math.isfinite(low) and math.isfinite(high)


def _copy_in(weights: dict[str, Tensor], source: Any, stored: StoredTensor, shard: Shard) -> torch.dtype | None:
    """Copies a stored tensor's parts, or this rank's slices of them, into the model.

    Returns the dtype in which a value is not finite, `None` if all values are finite.
    """
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
