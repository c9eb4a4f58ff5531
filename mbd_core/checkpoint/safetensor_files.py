"""A checkpoint's safetensors files: listed from headers, read, written in shards."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mbd_core.checkpoint.block_scales import FP8, READ_AS, SUFFIX, BlockShape, ScaledMatrix, block_shape, scales_shape
from mbd_core.checkpoint.streamed_tensors import StreamedTensors
from mbd_core.files import write_json
from mbd_core.json_text import parse_json
from mbd_core.storage.streamed import RangeReader, StreamedFile, stub_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = ".metadata"  # marks a distributed checkpoint
MAX_SHARD_BYTES = 5 * 10**9
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


LFS = b"version https://git-lfs"  # the first bytes of a file that `git clone` leaves without Git LFS

WRAPPERS = ("_checkpoint_wrapped_module", "_forward_module", "_fpw_module", "_fsdp_wrapped_module", "_orig_mod")
"""Names that wrappers add to a model's tensors: activation checkpointing, Fabric, FSDP, torch.compile."""


def without_wrappers(name: str) -> str:
    """A tensor's name in the model itself, when the model was saved from within wrappers (`WRAPPERS`, `module` of
    DDP)."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[0] == "module" and len(parts) > 1:
        parts.pop(0)
    return ".".join(parts)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ValueError` naming a file that is missing, unreadable or malformed."""
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
    """The file and the name of a matrix's scales, and their blocks."""

    path: Path
    name: str
    blocks: BlockShape


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's file, shape and dtype, from the file's header. With `scales` it is stored in FP8 and read as `dtype`.

    `name` is the file's own name of the tensor, which a wrapper may have changed.
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
    """Every tensor of a checkpoint folder by its name without wrappers, file after file. Only headers are read.

    Raises `ValueError` naming the file and the tensor if a shard is missing, cut short or damaged, if two shards hold
    the same tensor, if a file lacks a tensor of the index, or if there is a whole file beside the files of the index.
    """
    file_of = _index(folder)
    if file_of and WEIGHTS not in file_of.values() and _is_there(folder / WEIGHTS):
        raise ValueError(
            f"{folder} has weights twice, in {WEIGHTS} and by {INDEX} in {min(file_of.values())}; remove the "
            "index and its files, or the other file"
        )
    tensors: dict[str, TensorInfo] = {}
    fp8: list[str] = []
    for file in sorted(set(file_of.values())) or [WEIGHTS]:
        path = folder / file
        if not _is_there(path):
            names = sorted(name for name, where in file_of.items() if where == file)
            holds = f", which holds '{names[0]}' and {len(names) - 1} more tensors" if names else ""
            if not file_of and any(folder.glob("*.safetensors")):
                holds = f", and {INDEX}, which its other weights files need"
            elif not file_of and any(folder.glob("*.bin")):
                holds = "; its .bin files are not read: save the model as safetensors"
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


def _is_there(path: Path) -> bool:
    """Whether a file lies in its folder, or stays at its URL."""
    return path.exists() or stub_of(path).exists()


def _with_scales(folder: Path, tensors: dict[str, TensorInfo], fp8: list[str]) -> dict[str, TensorInfo]:
    """The tensors, each FP8 matrix with its scales. Raises `ValueError` naming a matrix whose scales do not fit."""
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
    """Keeps a file of tensors open until another file is requested, or the context ends."""

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
    """A tensor of an open file, read in parts by slicing. An FP8 tensor is multiplied by its scales; `scales` opens
    their file if it is another file."""
    name = info.name or name
    if info.scales is None:
        return file.get_slice(name)
    scales_file = file if info.scales.path == info.path else scales.at(info.scales.path)
    return ScaledMatrix(file.get_slice(name), scales_file.get_tensor(info.scales.name), info.scales.blocks)


class HfFolder:
    """The safetensors of a Hugging Face folder. At most one file of tensors and one file of scales are open at a
    time."""

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
    """`safe_open` on the CPU, or `StreamedTensors` for a file at a URL; `ValueError` names a damaged file and the
    first tensor that is cut off."""
    streamed = StreamedFile.at(path)
    if streamed is not None:
        with closing(RangeReader(streamed)) as reader:
            yield StreamedTensors(reader)
            if reader.was_read:
                reader.check_unchanged()
        return
    try:
        path.open("rb").close()  # its error says why a file cannot be read; safe_open's does not
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
    """The end of a clause: a cut file's first incomplete tensor, or its header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        raw = file.read(size) if size < path.stat().st_size else b""
        file.seek(0)
        if file.read(len(LFS)) == LFS:
            return " (it is a pointer of Git LFS; fetch the file itself with: git lfs pull)"
    try:
        header = json.loads(raw)
        ends = sorted((v["data_offsets"][1], n) for n, v in header.items() if n != "__metadata__")
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        return " in its header"
    cut = [name for end, name in ends if 8 + size + end > path.stat().st_size]
    return f" at tensor '{cut[0]}'" if cut else ""


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file of tensors that every user can read. Raises `OSError` if it cannot be written."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{path} cannot be written: {error}") from None
    path.chmod(0o644)  # safetensors makes files that only the owner can read


class ShardWriter:
    """Writes tensors into safetensors files of at most `max_bytes` (or one tensor), with one file's tensors in memory
    at a time."""

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
        write_safetensors(path, self._pending)
        self._shards.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0
