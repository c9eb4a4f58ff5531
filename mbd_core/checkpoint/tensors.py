"""The decoder's tensors in a checkpoint: the check against config.json, and one layout made of another."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mbd_core.checkpoint.safetensor_files import TensorInfo
from mbd_core.checkpoint.tensor_names import ExpertLayout, StoredTensor, TensorPart, TensorShape, stored_tensors
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig

# The check of a checkpoint's tensors against those that its config.json asks for.


def match_tensors(
    folder: Path, config: ModelConfig, listed: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, StoredTensor], ExpertLayout]:
    """The checkpoint's tensors to read, the decoder tensors that each of them holds, and the experts' layout.

    `listed` has all tensors of the files. Raises `ValueError` naming the file and the tensor if they are not exactly
    those that `config` asks for.
    """
    needed, shapes = dict(listed), decoder_shapes(config)
    _drop_tied_head(config, needed)
    layout = _detect_layout(config, shapes, needed)
    stored = stored_tensors(config, shapes, layout)
    _check_tensors(folder, config, needed, stored)
    return needed, stored, layout


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
            raise ValueError(f"{info.path} has an unexpected tensor '{name}' for {config.architecture}")
        wanted = expected[name].shape
        if info.shape == wanted:
            continue
        vocabulary = {"model.embed_tokens.weight", "lm_head.weight"} & {p.target for p in expected[name].parts}
        if vocabulary and info.shape[1:] == wanted[1:]:
            raise ValueError(
                f"{info.path}: tensor '{name}' has {info.shape[0]} rows, config.json says vocab_size={wanted[0]}"
            )
        raise ValueError(f"{info.path}: tensor '{name}' has shape {info.shape}, config.json asks for {wanted}")
    missing = sorted(expected.keys() - listed.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} lacks the tensor '{missing[0]}'{more}, which config.json asks for")


def _detect_layout(config: ModelConfig, shapes: dict[str, TensorShape], listed: Iterable[str]) -> ExpertLayout:
    """The layout that shares most names with the files, because no key of a config.json says it reliably."""
    layouts: tuple[ExpertLayout, ...] = ("per_expert", "fused", "decoder")
    names = set(listed)
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
    """The place of a part in the source: rows [start, stop) of the tensor `name`."""

    name: str
    start: int
    stop: int


class TensorPieces:
    """Assembles a target's tensors from a source's. The last source tensor is cached for the next part."""

    def __init__(self, source: WeightsFolder, stored: dict[str, StoredTensor]) -> None:
        self.source = source
        self.places: dict[TensorPart, _Place] = {}
        self.num_experts: dict[str, int] = {}
        for name, tensor in stored.items():
            start = 0
            for part, length in zip(tensor.parts, tensor.lengths, strict=True):
                self.places[part] = _Place(name, start, start + length)
                start += length
                if part.expert is not None:
                    self.num_experts[part.target] = self.num_experts.get(part.target, 0) + 1
        self._last: tuple[str, Tensor] | None = None

    def make(self, wanted: StoredTensor) -> Tensor:
        """A tensor of the target, read and assembled now."""
        parts = [self._part(part) for part in wanted.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def dtype(self, wanted: StoredTensor) -> torch.dtype:
        """The dtype of all parts of a tensor; `ValueError` names two parts whose dtypes differ."""
        infos = [(n, self.source.tensors[n].dtype) for part in wanted.parts for n in self._names(part)]
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
            return self._read(place.name)[place.start : place.stop]
        if part.expert is not None:
            return self._read(self.places[TensorPart(part.target)].name)[part.expert]
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
            self._last = None  # so that the old tensor's memory is free before the new one is read
            self._last = name, self.source.read(name)
        return self._last[1]
