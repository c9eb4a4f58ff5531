"""Reads and writes the weights in PyTorch's distributed checkpoints (DCP), about one file in memory at a time.

A training checkpoint holds the weights under `model.`. Its optimizer state and progress are not read here.
"""

import functools
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mbd_core.checkpoint.adaptation.trained_config import whole_recipe
from mbd_core.checkpoint.safetensor_files import MAX_SHARD_BYTES, METADATA, TensorInfo, read_json

PREFIX = "model."
MARKER = "checkpoint.json"
"""The file that our trainer writes into a checkpoint when all parts are there. It also holds the recipe."""
# the exceptions that unpickling a damaged file can raise, by Python's manual
UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)


def recorded_recipe(folder: Path) -> dict[str, Any] | None:
    """The recipe of the training whose checkpoint lies in `folder`; `None` if our trainer did not write it."""
    if not (folder / METADATA).exists() or not (folder / MARKER).exists():
        return None
    return whole_recipe(folder / MARKER, read_json(folder / MARKER).get("recipe"))


class DcpFolder:
    """The weights in a DCP folder. Its `.metadata` is a pickle: open only checkpoints that you trust.

    Raises `ValueError` if a file is missing or cut short, naming the file and the first incomplete tensor. Raises it
    too if a tensor's bytes are damaged, naming the tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _Reader(folder)
        try:
            metadata = self._reader.read_metadata()
        except UNPICKLING_ERRORS as error:
            raise ValueError(f"{folder / METADATA} is damaged or cut short: {error}") from None
        tensors = {n: m for n, m in metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        nested = any(name.startswith(f"{PREFIX}model.") for name in tensors)
        self._stored = {
            name.removeprefix(PREFIX) if nested else name: name
            for name in tensors
            if name.startswith(PREFIX if nested else ("model.", "lm_head."))
        }
        self.tensors = {
            name: TensorInfo(folder / METADATA, tuple(tensors[key].size), tensors[key].properties.dtype)
            for name, key in self._stored.items()
        }
        if not self.tensors:
            raise ValueError(f"{folder / METADATA} lists no tensor of a model")
        if any(".lora_" in name for name in self.tensors):
            raise ValueError(
                f"{folder} holds an adapter (LoRA) without its base; go on with its training, which merges the two at "
                "its end"
            )
        keys = set(self._stored.values())
        for index, where in (metadata.storage_data or {}).items():
            path = folder / where.relative_path
            if index.fqn not in keys:
                continue
            if not path.exists():
                raise ValueError(f"{folder} lacks the file {where.relative_path}, which holds '{index.fqn}'")
            if path.stat().st_size < where.offset + where.length:
                raise ValueError(f"{path} is cut short at tensor '{index.fqn}'")

    def read(self, name: str) -> Tensor:
        """A whole tensor, joined from the pieces of the training ranks."""
        info, key = self.tensors[name], self._stored[name]
        state = {key: torch.empty(info.shape, dtype=info.dtype)}
        try:
            with in_one_process():
                dcp.load(state, storage_reader=self._reader, no_dist=True)
        except (*UNPICKLING_ERRORS, RuntimeError) as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]  # the rest is PyTorch's advice
            raise ValueError(f"{self.folder}: tensor '{key}' is damaged: {reason}") from None
        return state[key]


def save_dcp(
    folder: Path, tensors: dict[str, Tensor], make: Callable[[str], Tensor], *, max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes a DCP checkpoint under `model.`. `tensors` are meta tensors; `make` returns the values of a name.

    A file holds at most `max_bytes`, or one tensor. DCP's writer keeps the content of one file in memory.
    """
    planner = _LazyPlanner(lambda name: make(name.removeprefix(PREFIX)))
    writer = _Writer(folder, max_bytes)
    with in_one_process():
        dcp.save({PREFIX + n: t for n, t in tensors.items()}, storage_writer=writer, planner=planner, no_dist=True)


@contextmanager
def in_one_process() -> Iterator[None]:
    """Runs a DCP call only in this process, without DCP's warning about that, and with errors as they were raised.

    DCP wraps errors, also Ctrl-C, into a report of all ranks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as report:
            raise next(iter(report.failures.values()))[0] from None


class _Reader(FileSystemReader):
    """Parses the metadata once instead of for every tensor."""

    @functools.cached_property
    def _parsed(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._parsed


class _Writer(FileSystemWriter):
    """Writes the files one after another; each looks like the file of one rank."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # no tensor is made until the previous one is written
        self._max_bytes = max_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_in_files(plan.items, self._max_bytes)):
            prefix = replace(plan.storage_data, prefix=f"__{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _in_files(items: Sequence[WriteItem], max_bytes: int) -> Iterator[list[WriteItem]]:
    """The items in order, cut into runs of at most `max_bytes`, or of one item."""
    run: list[WriteItem] = []
    num_bytes = 0
    for item in items:
        assert item.tensor_data is not None
        size = item.tensor_data.size.numel() * item.tensor_data.properties.dtype.itemsize
        if run and num_bytes + size > max_bytes:
            yield run
            run, num_bytes = [], 0
        run.append(item)
        num_bytes += size
    yield run


class _LazyPlanner(DefaultSavePlanner):
    """Plans with meta tensors; `make` is called for a tensor's values when the tensor is written."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._make = make

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._make(write_item.index.fqn)
