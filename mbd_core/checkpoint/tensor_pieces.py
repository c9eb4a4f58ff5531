"""Assembles the tensors of one checkpoint layout from the tensors of another."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mbd_core.checkpoint.safetensor_files import TensorInfo
from mbd_core.checkpoint.tensors import StoredTensor, TensorPart


class WeightsFolder(Protocol):
    """Weights to read (`HfFolder`, `DcpFolder`): a list of the tensors, and a whole tensor by name."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class _Span:
    """The place of a part in the source: [start, stop) of the tensor `name` along `dim`."""

    name: str
    start: int
    stop: int
    dim: int


class TensorPieces:
    """Assembles a target's tensors from a source's. The last source tensor is cached for the next part."""

    def __init__(self, source: WeightsFolder, stored: dict[str, StoredTensor]) -> None:
        self.source = source
        self.places: dict[TensorPart, _Span] = {}
        self.num_experts: dict[str, int] = {}
        for name, tensor in stored.items():
            start = 0
            for part, length in zip(tensor.parts, tensor.lengths, strict=True):
                self.places[part] = _Span(name, start, start + length, tensor.dim)
                start += length
                if part.expert is not None:
                    self.num_experts[part.target] = self.num_experts.get(part.target, 0) + 1
        self._last: tuple[str, Tensor] | None = None

    def make(self, target: StoredTensor) -> Tensor:
        """A tensor of the target, read and assembled now."""
        parts = [self._part(part) for part in target.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=target.dim)

    def dtype(self, target: StoredTensor) -> torch.dtype:
        """The dtype of all parts of a tensor. Raises `ValueError` naming two parts whose dtypes differ."""
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
