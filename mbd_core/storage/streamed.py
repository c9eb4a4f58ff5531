"""Safetensors that stay at their URL: a folder's copy has a stub for each file, and engines read the tensors by range.

A stub lies in the folder of its file, under the file's name followed by `STUB`. It names the file at the URL, its
version, and the head with which a safetensors file begins (8 bytes with its length, and JSON), so that shapes and
dtypes are known without a request.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, Self

import numpy as np

from mbd_core.files import write_json
from mbd_core.json_text import parse_json
from mbd_core.storage.download import NUM_STREAMS
from mbd_core.storage.errors import storage_errors
from mbd_core.storage.remote_files import file_version, open_storage

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
STUB = ".at-url.json"  # follows the file's name
LENGTH_BYTES = 8
MOST_HEAD_BYTES = 10**8  # safetensors' own limit
PIECE_BYTES = 16 * 2**20  # bytes of a request: the most that a stream loses when its connection breaks
PAUSES = (1.0, 4.0, 15.0)  # seconds before a range is asked for again


def stub_of(path: Path) -> Path:
    return path.with_name(path.name + STUB)


def is_streamed(name: str) -> bool:
    """Whether a file of a model folder can be read by range. Only weights of the folder itself can, not weights of a
    folder within it."""
    return name.endswith(".safetensors") and "/" not in name


@dataclass(frozen=True)
class StreamedFile:
    """A safetensors file at the URL `folder`/`name`, as it was when its stub was written."""

    folder: str
    name: str
    size: int
    version: list[str]
    begin: int
    """The byte at which the tensors begin."""
    tensors: dict[str, Any]
    """The head: each tensor's dtype, shape and `data_offsets`, which count from `begin`."""

    @classmethod
    def at(cls, path: Path) -> Self | None:
        """The file at a URL that `path` stands for; `None` if there is no stub."""
        try:
            return cls(**json.loads(stub_of(path).read_bytes()))
        except FileNotFoundError:
            return None

    @classmethod
    def asked(cls, folder: str, name: str) -> Self:
        """The file as it lies in the storage now. Raises `ValueError` if it is no safetensors file, and the storage's
        own errors."""
        system, path = open_storage(folder)
        information = system.info(f"{path}/{name}")
        size, where = information["size"], f"{folder}/{name} is damaged or cut short"
        first = system.cat_file(f"{path}/{name}", start=0, end=LENGTH_BYTES)
        length = struct.unpack("<Q", first)[0] if len(first) == LENGTH_BYTES else MOST_HEAD_BYTES
        begin = LENGTH_BYTES + length
        if length >= MOST_HEAD_BYTES or begin > size:
            raise ValueError(f"{where} in its header: the first 8 bytes are not its length")
        head = parse_json(system.cat_file(f"{path}/{name}", start=LENGTH_BYTES, end=begin), where)
        try:
            tensors = {tensor: dict(values) for tensor, values in head.items() if tensor != "__metadata__"}
            cut = [tensor for tensor, values in tensors.items() if not _fits(values, size - begin)]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"{where} in its header: it describes no tensors") from None
        if cut:
            raise ValueError(f"{where} at tensor '{cut[0]}'")
        return cls(folder, name, size, file_version(information), begin, tensors)

    def write_stub(self, target: Path) -> None:
        write_json(stub_of(target / self.name), asdict(self))

    @property
    def url(self) -> str:
        return f"{self.folder}/{self.name}"


def _fits(tensor: Mapping[str, Any], most: int) -> bool:
    start, end = tensor["data_offsets"]
    return bool(0 <= start <= end <= most) and all(isinstance(size, int) for size in tensor["shape"])


class RangeReader:
    """Reads ranges of a `StreamedFile`, over `NUM_STREAMS` connections, whatever the number of threads that ask.

    A range that breaks off is asked for again; ranges that have arrived stay. If the last attempt fails, all ranges
    fail. A reader calls `check_unchanged` at its end: only then are all ranges known to be of one version.
    """

    def __init__(self, file: StreamedFile) -> None:
        self.file, self.was_read = file, False
        self._streams = ThreadPoolExecutor(NUM_STREAMS)
        self._has_ended = Event()
        self._failure: OSError | None = None

    @cached_property
    def _storage(self) -> tuple[Any, str]:
        system, path = open_storage(self.file.folder)
        return system, f"{path}/{self.file.name}"

    def read_into(self, content: Bytes, start: int) -> None:
        """Fill an array with the bytes from `start` on, counted from `begin`. Raises `ValueError`, one sentence."""
        self.was_read = True

        def fetch(at: int) -> None:
            piece = content[at : at + PIECE_BYTES]
            piece[:] = self._piece(self.file.begin + start + at, len(piece))

        with storage_errors(self.file.folder, "cannot be read", ValueError):
            for _ in self._streams.map(fetch, range(0, len(content), PIECE_BYTES)):
                pass

    def _piece(self, start: int, length: int) -> Bytes:
        system, path = self._storage
        for pause in _pauses():
            try:
                content = system.cat_file(path, start=start, end=start + length)
                if len(content) == length:
                    return np.frombuffer(content, np.uint8)
                raise OSError(f"{self.file.name} gave {len(content):,} bytes where {length:,} were asked for")
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:  # each storage raises types of its own
                if pause is None and self._failure is None:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    self._failure = OSError(
                        f"{reason} (asked {len(PAUSES) + 1} times; start again, or with --url-weights cache, "
                        "which keeps what has come)"
                    )
                    self._has_ended.set()
                if self._has_ended.wait(pause):
                    raise self._failure or error from error
        raise AssertionError

    def check_unchanged(self) -> None:
        """Raise `ValueError` if the file at the URL has another version than the stub."""
        with storage_errors(self.file.folder, "cannot be read", ValueError):
            system, path = self._storage
            now = file_version(system.info(path))
        if now != self.file.version:
            raise ValueError(f"{self.file.url} was changed since its folder was asked for; start again")

    def close(self) -> None:
        self._has_ended.set()
        self._streams.shutdown(wait=False, cancel_futures=True)


def _pauses() -> Iterator[float | None]:
    """The seconds to wait after each failure; `None` after the last."""
    yield from PAUSES
    yield None
