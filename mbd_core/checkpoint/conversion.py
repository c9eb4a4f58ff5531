"""Checkpoints from one layout to another: single or stacked experts, Hugging Face folder or distributed checkpoint.

Both layouts are ways of storing the same decoder tensors (`names.py`), so every tensor of the target is cut and put
together from tensors of the source, a few in memory at a time. No value changes, and none is cast.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mbd_core.checkpoint.dcp import DcpFolder, save_dcp
from mbd_core.checkpoint.families import FAMILIES
from mbd_core.checkpoint.loading import (
    check_new,
    check_room,
    decoder_shapes,
    load_config,
    match_tensors,
    written_beside,
)
from mbd_core.checkpoint.safetensor_files import (
    INDEX,
    MAX_SHARD_BYTES,
    METADATA,
    ShardWriter,
    TensorInfo,
    list_tensors,
    open_file,
)
from mbd_core.checkpoint.tensor_names import ExpertLayout, Part, Stored, stored_tensors
from mbd_core.models.model_config import ModelConfig

Format = Literal["hf", "dcp"]
# never copied as files beside the weights: what is converted, and the same weights in formats that are not read
WEIGHTS_ENDINGS = (".safetensors", ".distcp", ".bin", ".pt", ".pth", ".gguf", ".bin.index.json", INDEX, METADATA)


class Source(Protocol):
    """Weights to read: what there is, and a whole tensor by name."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor: ...


class HfFolder:
    """The safetensors of a Hugging Face folder, one file open at a time."""

    def __init__(self, folder: Path) -> None:
        self.tensors = list_tensors(folder)
        self._open: tuple[Path, Any] | None = None
        self._files = ExitStack()

    def read(self, name: str) -> Tensor:
        path = self.tensors[name].path
        if self._open is None or self._open[0] != path:
            self._files.close()
            self._open = path, self._files.enter_context(open_file(path))
        return self._open[1].get_tensor(name)


@dataclass(frozen=True)
class _Place:
    """Where the source keeps a decoder tensor: rows `start` to `stop` of `name`, or one `name` an expert."""

    name: str
    start: int
    stop: int


def convert(
    source: Path,
    target: Path,
    *,
    experts: ExpertLayout | None = None,
    to: Format | None = None,
    config_from: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write `source` as a new folder `target`, with the files that lie beside the weights; None keeps a layout.

    `config_from` is the folder with config.json and tokenizer if the source has none. `progress` hears of bytes
    written so far and in all. Raises `ValueError` naming the file and the tensor, or both sizes where the disk has no
    room; nothing is left behind then.
    """
    check_new(target)
    beside_weights = config_from or source
    if (source / METADATA).exists() and not (beside_weights / "config.json").exists():
        raise ValueError(f"{beside_weights} has no config.json; name a folder that has one (--config)")
    config = load_config(beside_weights)
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} lies inside {source}, which is read; give a folder elsewhere")
    if experts == "fused" and config.moe is None:
        raise ValueError(f"experts='fused' stacks experts and the {config.architecture} in {beside_weights} has none")
    weights: Source = DcpFolder(source) if (source / METADATA).exists() else HfFolder(source)
    to = to or ("dcp" if isinstance(weights, DcpFolder) else "hf")
    _, stored, layout = match_tensors(source, config, weights.tensors)
    kept = layout if layout != "decoder" else "per_expert"
    wanted = stored_tensors(config, decoder_shapes(config), experts or kept)
    pieces = _Pieces(weights, stored)
    dtypes = {name: pieces.dtype(target_stored) for name, target_stored in wanted.items()}
    sizes = {n: torch.Size(s.shape).numel() * dtypes[n].itemsize for n, s in wanted.items()}
    total, done = sum(sizes.values()), 0
    check_room(target, total)

    def made(name: str) -> Tensor:
        nonlocal done
        tensor = pieces.make(wanted[name])
        done += sizes[name]
        progress(done, total)
        return tensor

    with written_beside(target) as beside:
        _copy_rest(beside_weights, beside, config, fused=_fused(wanted))
        if to == "dcp":
            planned = {n: torch.empty(s.shape, dtype=dtypes[n], device="meta") for n, s in wanted.items()}
            save_dcp(beside, planned, made, max_bytes=max_shard_bytes)
        else:
            writer = ShardWriter(beside, max_bytes=max_shard_bytes)
            for name in wanted:
                writer.add(name, made(name))
            writer.close()


class _Pieces:
    """Puts a target's tensors together from a source's; the last tensor read is kept, for it is often the next too."""

    def __init__(self, source: Source, stored: dict[str, Stored]) -> None:
        self.source = source
        self.places: dict[Part, _Place] = {}
        self.num_experts: dict[str, int] = {}
        for name, tensor in stored.items():
            start = 0
            for part, length in zip(tensor.parts, tensor.lengths, strict=True):
                self.places[part] = _Place(name, start, start + length)
                start += length
                if part.expert is not None:
                    self.num_experts[part.target] = self.num_experts.get(part.target, 0) + 1
        self._last: tuple[str, Tensor] | None = None

    def make(self, wanted: Stored) -> Tensor:
        parts = [self._part(part) for part in wanted.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def dtype(self, wanted: Stored) -> torch.dtype:
        """The one dtype of everything that goes into a tensor; `ValueError` names two that differ."""
        infos = [(n, self.source.tensors[n].dtype) for part in wanted.parts for n in self._names(part)]
        for name, dtype in infos:
            if dtype != infos[0][1]:
                raise ValueError(f"'{name}' is {dtype} but '{infos[0][0]}', beside it in one tensor, is {infos[0][1]}")
        return infos[0][1]

    def _names(self, part: Part) -> Iterator[str]:
        """The source tensors that hold a part."""
        if part in self.places:
            yield self.places[part].name
        elif part.expert is not None:
            yield self.places[Part(part.target)].name
        else:
            for expert in range(self.num_experts[part.target]):
                yield self.places[Part(part.target, expert)].name

    def _part(self, part: Part) -> Tensor:
        if part in self.places:
            place = self.places[part]
            return self._read(place.name)[place.start : place.stop]
        if part.expert is not None:
            return self._read(self.places[Part(part.target)].name)[part.expert]
        stacked: Tensor | None = None
        for expert, name in enumerate(self._names(part)):
            single = self._read(name)
            if stacked is None:
                stacked = torch.empty((self.num_experts[part.target], *single.shape), dtype=single.dtype)
            stacked[expert].copy_(single)
        assert stacked is not None
        return stacked

    def _read(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # let go of the old one before the new one is read
            self._last = name, self.source.read(name)
        return self._last[1]


def _fused(wanted: dict[str, Stored]) -> bool:
    return any(".mlp.experts." in p.target and p.expert is None for s in wanted.values() for p in s.parts)


def _copy_rest(source: Path, target: Path, config: ModelConfig, *, fused: bool) -> None:
    """The files beside the weights; config.json's model_type says how experts lie in families that tell it so."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHTS_ENDINGS):
            shutil.copyfile(path, target / path.name)
    types = FAMILIES[config.architecture].expert_model_types
    if types is None:
        return
    text = (target / "config.json").read_text()
    wanted = types["fused" if fused else "per_expert"]
    kept = json.loads(text).get("model_type")
    if kept is not None and kept != wanted:
        text = re.sub(rf'("model_type"\s*:\s*)"{re.escape(kept)}"', rf'\1"{wanted}"', text, count=1)
        (target / "config.json").write_text(text)
