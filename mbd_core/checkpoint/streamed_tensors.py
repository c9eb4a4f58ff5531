"""Tensors of a safetensors file at a URL, read by slices, as `safe_open` reads a file here."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mbd_core.storage.download import NUM_STREAMS, SILENT_SECONDS
from mbd_core.storage.streamed import RangeReader

READ_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor. Slicing it reads whole rows, only the rows of the slice."""

    reader: RangeReader
    name: str

    def get_dtype(self) -> str:
        return str(self._entry["dtype"])

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def __getitem__(self, where: slice | tuple[slice, ...]) -> Tensor:
        slices = where if isinstance(where, tuple) else (where,)
        shape, dtype = self.get_shape(), READ_DTYPES[self.get_dtype()]
        start, end = self._entry["data_offsets"]
        if end - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"{self.reader.file.url} is damaged: tensor '{self.name}' has {end - start:,} bytes")
        if shape:
            rows = range(shape[0])[slices[0] if slices else slice(None)]
            assert rows.step == 1
            row_bytes = (end - start) // shape[0] if shape[0] else 0
            start, shape = start + rows.start * row_bytes, [len(rows), *shape[1:]]
        read = torch.empty(shape, dtype=dtype)
        self.reader.read_into(read.view(-1).view(torch.uint8).numpy(), start)
        return read[(slice(None), *slices[1:])] if shape else read

    @property
    def _entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = self.reader.file.tensors[self.name]
        return entry


@dataclass(frozen=True)
class StreamedTensors:
    """The tensors of a file, with the methods of `safe_open`'s."""

    reader: RangeReader

    def keys(self) -> list[str]:
        """The names by their place in the file."""
        tensors = self.reader.file.tensors
        return sorted(tensors, key=lambda name: tensors[name]["data_offsets"])

    def get_slice(self, name: str) -> StreamedTensor:
        return StreamedTensor(self.reader, name)

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[:]


@contextmanager
def many_at_once(file: Any, count: int, *, quiet: bool) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` for work on `count` tensors of an open file. From a file at a URL it reads several tensors at once, and
    shows a bar unless `quiet`."""
    if not isinstance(file, StreamedTensors):
        yield map
        return
    with (
        ThreadPoolExecutor(NUM_STREAMS) as threads,
        tqdm(
            total=count,
            desc=f"reading {file.reader.file.url}",
            unit=" tensors",
            delay=SILENT_SECONDS,
            mininterval=5.0,
            disable=quiet,
        ) as bar,
    ):

        def mapped(work: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
            for result in threads.map(work, *arguments):
                bar.update()
                yield result

        try:
            yield mapped
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
