"""A checkpoint's safetensors files: listed from headers, read, written in shards; FP8 weights with block scales."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mbd_core.files import write_json
from mbd_core.json_text import parse_json

# FP8 weights as they are released: a float8 matrix, and beside it `..._scale_inv`, a factor for each of its blocks.
#
# `weight[i, j] = stored[i, j] * weight_scale_inv[i // R, j // C]`, with blocks of R x C as config.json's
# `quantization_config` says (128 x 128 in the releases). They are read as bfloat16 matrices, block by block of what
# is asked for; `models/quantize.py` may round them again for computing in FP8. Experts can also keep their values and
# scales (`loading.py`).

SUFFIX = "_scale_inv"
READ_AS = torch.bfloat16
"""What the released models compute in where they do not compute in FP8."""

BlockShape = tuple[int, int]
# What says how activations are rounded where products are FP8, and what the tensors' dtypes show by themselves.
HARMLESS = ("activation_scheme", "dequantize", "fmt", "ignored_layers", "modules_to_not_convert", "scale_fmt")
KNOWN_KEYS = ("quant_method", "weight_block_size", *HARMLESS)


def block_shape(config: Mapping[str, Any]) -> BlockShape | None:
    """The blocks of a parsed config.json, `None` for weights that are not quantized.

    Raises `ValueError` for any other quantization.
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
            "fp8 with a block of two sizes is read, or take a release whose weights are not quantized"
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
    """The shape of a matrix's scales: its last blocks may be cut."""
    return tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix in a file, read in parts by slicing, as safetensors' own: `stored` (float8), and its scales."""

    stored: Any
    scales: Tensor
    blocks: BlockShape

    def __getitem__(self, where: slice | tuple[slice, ...]) -> Tensor:
        """Float32 rows and columns."""
        ranges = self._ranges(where)
        rows, columns = (
            torch.arange(span.start, span.stop) // block for span, block in zip(ranges, self.blocks, strict=True)
        )
        part = self.stored[tuple(slice(span.start, span.stop) for span in ranges)]
        return part.to(torch.float32) * self.scales.to(torch.float32)[rows][:, columns]

    def as_stored(self, where: tuple[slice, ...]) -> tuple[Tensor, Tensor]:
        """The float8 values of rows and columns that begin where blocks do, and their blocks' scales, float32."""
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


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = ".metadata"  # marks a distributed checkpoint
MAX_SHARD_BYTES = 5 * 10**9
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8 = "F8_E4M3"


WRAPPERS = ("_checkpoint_wrapped_module", "_forward_module", "_fpw_module", "_fsdp_wrapped_module", "_orig_mod")
"""What wrappers write into the names of a model's tensors: activation checkpointing, Fabric, FSDP, torch.compile."""


def without_wrappers(name: str) -> str:
    """A tensor's name in the model itself, which was saved from within wrappers (`WRAPPERS`, `module` of DDP)."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[0] == "module" and len(parts) > 1:
        parts.pop(0)
    return ".".join(parts)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `ValueError` names a file that is missing, unreadable or malformed."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path.parent} is not a model folder: it has no {path.name}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    value = parse_json(content, str(path))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


@dataclass(frozen=True)
class StoredScales:
    """The file and the name of a matrix's scales, and the blocks that they are for."""

    path: Path
    name: str
    blocks: BlockShape


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's file, shape and dtype, from the file's header; with `scales` it is FP8 there and read as `dtype`.

    `name` is the file's own name of the tensor where a wrapper wrote it.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    scales: StoredScales | None = None
    name: str | None = None

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def list_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint folder by its name without wrappers, file after file; only headers are read.

    Raises `ValueError` naming the file and the tensor if a shard is missing, cut short or damaged, if two shards hold
    the same tensor, or if a file lacks a tensor that the index lists.
    """
    file_of = _index(folder)
    tensors: dict[str, TensorInfo] = {}
    fp8: list[str] = []
    for file in sorted(set(file_of.values())) or [WEIGHTS]:
        path = folder / file
        if not path.exists():
            names = sorted(name for name, where in file_of.items() if where == file)
            holds = f", which holds '{names[0]}' and {len(names) - 1} more tensors" if names else ""
            if not file_of and any(folder.glob("*.safetensors")):
                holds = f", and {INDEX}, which its other weights files need"
            raise ValueError(f"{folder} lacks the weights file {file}{holds}")
        with open_file(path) as tensors_file:
            for stored_name in tensors_file.keys():  # noqa: SIM118 (not a dict)
                part, name = tensors_file.get_slice(stored_name), without_wrappers(stored_name)
                if name in tensors and tensors[name].path != path:
                    raise ValueError(f"{path} and {tensors[name].path.name} both hold the tensor '{name}'")
                if name in tensors:
                    both = f"'{tensors[name].name or name}' and '{stored_name}'"
                    raise ValueError(f"{path}: {both} are the same tensor of the model; keep one of them")
                if part.get_dtype() == FP8:
                    fp8.append(name)
                elif part.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{path}: tensor '{stored_name}' has dtype {part.get_dtype()}; known: {', '.join(DTYPES)}"
                    )
                tensors[name] = TensorInfo(
                    path,
                    tuple(part.get_shape()),
                    DTYPES.get(part.get_dtype(), READ_AS),
                    name=None if stored_name == name else stored_name,
                )
    for stored_name, file in file_of.items():
        if without_wrappers(stored_name) not in tensors:
            raise ValueError(f"{folder / file} lacks the tensor '{stored_name}', which {INDEX} says is there")
    return _with_scales(folder, tensors, fp8) if fp8 else tensors


def _with_scales(folder: Path, tensors: dict[str, TensorInfo], fp8: list[str]) -> dict[str, TensorInfo]:
    """The tensors, each FP8 matrix with its scales; `ValueError` names one whose scales do not fit it."""
    blocks = block_shape(read_json(folder / "config.json"))
    if blocks is None:
        raise ValueError(
            f"{tensors[fp8[0]].path}: tensor '{fp8[0]}' is FP8, and config.json has no quantization_config"
        )
    matrices = dict(tensors)
    for name in fp8:
        info, scales = tensors[name], tensors.get(name + SUFFIX)
        if scales is None:
            raise ValueError(f"{info.path}: tensor '{name}' is FP8, and the folder lacks its scales, '{name}{SUFFIX}'")
        if len(info.shape) != 2 or scales.shape != scales_shape(info.shape, blocks):
            raise ValueError(
                f"{scales.path}: tensor '{name}{SUFFIX}' has shape {scales.shape}, and '{name}' of shape {info.shape} "
                f"has blocks of {blocks[0]} x {blocks[1]}"
            )
        del matrices[name + SUFFIX]
        stored_scales = StoredScales(scales.path, scales.name or name + SUFFIX, blocks)
        matrices[name] = replace(info, scales=stored_scales)
    return matrices


class LastFile:
    """A file of tensors that stays open until another one is asked for, or the context ends."""

    def __init__(self) -> None:
        self._open: tuple[Path, Any] | None = None
        self._files = ExitStack()

    def at(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self.__exit__()
            self._open = path, self._files.enter_context(open_file(path))
        return self._open[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open = None
        self._files.close()


def matrix_slice(file: Any, name: str, info: TensorInfo, scales: LastFile) -> Any:
    """A tensor of an open file, to be read in parts by slicing; one in FP8 is multiplied by its scales, which may lie
    in the file `scales`."""
    name = info.name or name
    if info.scales is None:
        return file.get_slice(name)
    scales_file = file if info.scales.path == info.path else scales.at(info.scales.path)
    return ScaledMatrix(file.get_slice(name), scales_file.get_tensor(info.scales.name), info.scales.blocks)


class HfFolder:
    """The safetensors of a Hugging Face folder; of their files one of tensors and one of scales are open at a time."""

    def __init__(self, folder: Path) -> None:
        self.tensors = list_tensors(folder)
        self._file, self._scales = LastFile(), LastFile()

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        file = self._file.at(info.path)
        if info.scales is None:
            tensor: Tensor = file.get_tensor(info.name or name)
            return tensor
        return matrix_slice(file, name, info, self._scales)[:].to(info.dtype)


@contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """`safe_open` on the CPU; `ValueError` names a damaged file and the first tensor that is cut off."""
    try:
        path.open("rb").close()  # its error says why a file cannot be read; the error of safe_open does not
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short{_where_cut(path)}: {error}") from None


def _index(folder: Path) -> dict[str, str]:
    """The index's map from tensor to file, empty for a folder without an index."""
    index = folder / INDEX
    if not index.exists():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} has the tensor '{name}' in {file!r}, which is no file name in its folder")
    return weight_map


def _where_cut(path: Path) -> str:
    """Where a file is cut off, as the end of a clause: at its first incomplete tensor, or in its header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        raw = file.read(size) if size < path.stat().st_size else b""
    try:
        header = json.loads(raw)
        ends = sorted((v["data_offsets"][1], n) for n, v in header.items() if n != "__metadata__")
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        return " in its header"
    cut = [name for end, name in ends if 8 + size + end > path.stat().st_size]
    return f" at tensor '{cut[0]}'" if cut else ""


class ShardWriter:
    """Writes tensors into safetensors files of at most `max_bytes` (or one tensor), one at a time in memory."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self.max_bytes:
            self._flush()
        # a contiguous copy, because safetensors refuses tensors that share memory
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes

    def close(self) -> None:
        """Write the last file, give the files their final names, and write an index if there are several."""
        if self._pending or not self._shards:
            self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self.folder / WEIGHTS)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(self.folder / INDEX, index)

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"

    def _flush(self) -> None:
        path = self._part(len(self._shards))
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, say
            raise OSError(f"{path} cannot be written: {error}") from None
        path.chmod(0o644)  # safetensors makes files that only the owner can read
        self._shards.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0
