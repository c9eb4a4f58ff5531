"""The decoder's tensors in a checkpoint: names, shapes, the check against config.json, one layout made of another."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mbd_core.checkpoint.families import FAMILIES, ExpertLayout
from mbd_core.checkpoint.safetensor_files import TensorInfo
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig

# The names and shapes of the decoder's tensors in a checkpoint: the family's names, fused projections, experts.

FLOAT32_ALWAYS = ("expert_bias",)  # tensors with these name endings are float32, whatever the checkpoint's dtype
TensorShape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A part of a stored tensor: the decoder's tensor `target`, or only its expert number `expert`."""

    target: str
    expert: int | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A checkpoint's tensor: its shape, and its parts, which lie one after another along dimension `dim`.

    `lengths` has the size of each part there.
    """

    shape: TensorShape
    parts: tuple[TensorPart, ...]
    lengths: tuple[int, ...]
    dim: int = 0


def stored_tensors(
    config: ModelConfig, shapes: Mapping[str, TensorShape], experts: ExpertLayout
) -> dict[str, StoredTensor]:
    """Every tensor of this model's checkpoint, by its name there; `shapes` are those of the whole decoder.

    "per_expert": one tensor an expert, as in published checkpoints. "fused": a layer's experts stacked, as in training
    checkpoints. "decoder": the decoder's own names and shapes, as our trainer writes them.
    """
    names: Mapping[str, str] = {} if experts == "decoder" else FAMILIES[config.architecture].names
    parts_of: dict[str, list[TensorPart]] = {}
    for ours in shapes:
        if ours == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = _stored_name(ours, names)
        if "{e}" not in theirs:
            parts_of.setdefault(theirs, []).append(TensorPart(ours))
        elif experts == "fused":
            parts_of[ours] = [TensorPart(ours)]
        else:
            for expert in range(shapes[ours][0]):
                parts_of[theirs.replace("{e}", str(expert))] = [TensorPart(ours, expert)]
    return {name: _stored_tensor(parts, shapes) for name, parts in parts_of.items()}


def _stored_name(ours: str, names: Mapping[str, str]) -> str:
    """The family's name for the decoder tensor `ours`; modules that are not in `names` keep their names."""
    layer = re.search(r"\.layers\.(\d+)\.", ours)
    number = layer[1] if layer else ""
    pattern = ours.replace(f".layers.{number}.", ".layers.{i}.", 1) if layer else ours
    if pattern in names:
        return names[pattern].replace("{i}", number)
    module, _, leaf = pattern.rpartition(".")
    return f"{names.get(module, module)}.{leaf}".replace("{i}", number)


def _stored_tensor(parts: list[TensorPart], shapes: Mapping[str, TensorShape]) -> StoredTensor:
    part_shapes = [shapes[p.target] if p.expert is None else shapes[p.target][1:] for p in parts]
    dim = 1 if len(parts) > 1 and len(part_shapes[0]) == 3 else 0  # stacks of experts are joined expert by expert
    lengths = tuple(shape[dim] for shape in part_shapes)
    whole = (*part_shapes[0][:dim], sum(lengths), *part_shapes[0][dim + 1 :])
    return StoredTensor(whole, tuple(parts), lengths, dim)


# The check of a checkpoint's tensors against those that its config.json asks for.


def match_tensors(
    folder: Path, config: ModelConfig, listed: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, StoredTensor], ExpertLayout]:
    """The checkpoint's tensors to read, the decoder tensors that each of them holds, and the experts' layout.

    `listed` has all tensors of the files; those that the family skips are dropped. Raises `ValueError` naming the file
    and the tensor if the others are not exactly those that `config` asks for.
    """
    skipped, shapes = FAMILIES[config.architecture].skipped, decoder_shapes(config)
    infos = {name: info for name, info in listed.items() if not name.startswith(skipped)}
    _drop_tied_head(config, infos)
    layout = _detect_layout(config, shapes, infos)
    stored = stored_tensors(config, shapes, layout)
    _check_tensors(folder, config, infos, stored)
    return infos, stored, layout


def decoder_shapes(config: ModelConfig) -> dict[str, TensorShape]:
    """The shape of every tensor of the whole decoder, found without allocating it."""
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Decoder(config).state_dict().items()}


def _check_tensors(
    folder: Path, config: ModelConfig, listed: dict[str, TensorInfo], expected: dict[str, StoredTensor]
) -> None:
    """Raise `ValueError`, naming file and tensor, unless `listed` has exactly the expected tensors in their shapes."""
    for name, info in listed.items():
        if name not in expected:
            if "flat_param" in name:
                raise ValueError(
                    f"{info.path}: tensor '{name}' is FSDP's flattened parameter of several; save the model's full "
                    "state dict"
                )
            raise ValueError(f"{info.path} has an unexpected tensor '{name}' for {config.architecture}")
        shape = expected[name].shape
        if info.shape == shape:
            continue
        vocabulary = {"model.embed_tokens.weight", "lm_head.weight"} & {p.target for p in expected[name].parts}
        if vocabulary and info.shape[1:] == shape[1:]:
            raise ValueError(
                f"{info.path}: tensor '{name}' has {info.shape[0]} rows, config.json says vocab_size={shape[0]}"
            )
        raise ValueError(f"{info.path}: tensor '{name}' has shape {info.shape}, config.json asks for {shape}")
    missing_names = sorted(expected.keys() - listed.keys())
    if missing_names:
        more = f" and {len(missing_names) - 1} more" if len(missing_names) > 1 else ""
        raise ValueError(f"{folder} lacks the tensor '{missing_names[0]}'{more}, which config.json asks for")


def _detect_layout(config: ModelConfig, shapes: dict[str, TensorShape], tensor_names: Iterable[str]) -> ExpertLayout:
    """The layout that shares most names with the files, because no key of a config.json says it reliably."""
    layouts: tuple[ExpertLayout, ...] = ("per_expert", "fused", "decoder")
    names = set(tensor_names)
    return max(layouts, key=lambda layout: len(names & stored_tensors(config, shapes, layout).keys()))


def _drop_tied_head(config: ModelConfig, listed: dict[str, TensorInfo]) -> None:
    """Remove the lm_head from `listed` if embeddings are tied: some files store the embeddings a second time there."""
    if config.tie_word_embeddings:
        untied = replace(config, tie_word_embeddings=False)
        for name in stored_tensors(untied, {"lm_head.weight": (1, 1)}, "per_expert"):
            listed.pop(name, None)


# Assembles the tensors of one checkpoint layout from those of another.


class WeightsFolder(Protocol):
    """Weights to read (`HfFolder`, `DcpFolder`): a list of the tensors, and a whole tensor by name."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class _Place:
    """The place of a part in the source: [start, stop) of the tensor `name` along `dim`."""

    name: str
    start: int
    stop: int
    dim: int


class TensorPieces:
    """Assembles a target's tensors from a source's. The last source tensor is cached for the next part."""

    def __init__(self, source: WeightsFolder, stored: dict[str, StoredTensor]) -> None:
        self.source = source
        self.places: dict[TensorPart, _Place] = {}
        self.num_experts: dict[str, int] = {}
        for name, tensor in stored.items():
            start = 0
            for part, length in zip(tensor.parts, tensor.lengths, strict=True):
                self.places[part] = _Place(name, start, start + length, tensor.dim)
                start += length
                if part.expert is not None:
                    self.num_experts[part.target] = self.num_experts.get(part.target, 0) + 1
        self._last: tuple[str, Tensor] | None = None

    def make(self, target: StoredTensor) -> Tensor:
        """A tensor of the target, read and assembled now."""
        parts = [self._part(part) for part in target.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=target.dim)

    def dtype(self, target: StoredTensor) -> torch.dtype:
        """The dtype of all parts of a tensor; `ValueError` names two parts whose dtypes differ."""
        infos = [(n, self.source.tensors[n].dtype) for part in target.parts for n in self._names(part)]
        for name, dtype in infos:
            if dtype != infos[0][1]:
                raise ValueError(f"'{name}' is {dtype} but '{infos[0][0]}' is {infos[0][1]}; one tensor needs both")
        return infos[0][1]

    def _names(self, part: TensorPart) -> Iterator[str]:
        """The source tensors that hold a part."""
        if part in self.places:
            yield self.places[part].name
        elif part.expert is not None:
            yield self.places[TensorPart(part.target)].name
        else:
            for expert in range(self.num_experts[part.target]):
                yield self.places[TensorPart(part.target, expert)].name

    def _part(self, part: TensorPart) -> Tensor:
        if part in self.places:
            place = self.places[part]
            return self._read(place.name).narrow(place.dim, place.start, place.stop - place.start)
        if part.expert is not None:
            return self._read(self.places[TensorPart(part.target)].name)[part.expert]
        stack: Tensor | None = None
        for expert, name in enumerate(self._names(part)):
            single = self._read(name)
            if stack is None:
                stack = torch.empty((self.num_experts[part.target], *single.shape), dtype=single.dtype)
            stack[expert].copy_(single)
        assert stack is not None
        return stack

    def _read(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # so that the old tensor's memory is free before the new one is read
            self._last = name, self.source.read(name)
        return self._last[1]
