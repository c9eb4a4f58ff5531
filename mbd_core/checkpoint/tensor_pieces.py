"""Assembles the tensors of one checkpoint layout from those of another."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mbd_core.checkpoint.safetensor_files import TensorInfo
from mbd_core.checkpoint.tensor_names import StoredTensor, TensorPart


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
