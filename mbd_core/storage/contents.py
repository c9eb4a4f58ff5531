"""The contents of a path as a few bytes, by which machines compare their copies without reading all of them.

A copy of small contents is carried as chunks; the carrier decides where each chunk lies (`actors/paths.py`).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mbd_core.storage.cache import FolderCache
from mbd_core.storage.errors import storage_errors

SAMPLE = 2**16
"""Bytes at a file's beginning, and at its end, that are compared."""
CHUNK = 16 * 2**20
UNUSED_DAYS = 14.0
"""A copy that no job has asked for in this number of days is removed when the next copy is written."""


@dataclass(frozen=True)
class Contents:
    """Bytes of the files at a path, and the digest of their names, sizes, beginnings and ends."""

    size: int
    digest: str


def contents_of(path: Path) -> Contents | None:
    """The contents of a file, or of a folder without its hidden files; `None` if nothing readable lies there."""
    digest, total = hashlib.sha256(), 0
    try:
        files = files_at(path)
        for name, file in files.items():
            size = file.stat().st_size
            digest.update(f"{name}\0{size}\0".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(SAMPLE))
                opened.seek(max(SAMPLE, size - SAMPLE))
                digest.update(opened.read(SAMPLE))
            total += size
    except OSError:
        return None
    return Contents(total, digest.hexdigest()) if files else None


def files_at(path: Path) -> dict[str, Path]:
    """The files of a folder by their relative names, without hidden files; a file itself has the empty name."""
    if path.is_file():
        return {"": path}
    names = {file.relative_to(path): file for file in sorted(path.rglob("*")) if file.is_file()}
    return {
        name.as_posix(): file for name, file in names.items() if not any(part.startswith(".") for part in name.parts)
    }


@dataclass(frozen=True)
class Copy:
    """The whole contents of a path: their digest, and the references of each file's chunks, for `get`."""

    name: str
    digest: str
    files: tuple[tuple[str, tuple[Any, ...]], ...]

    @classmethod
    def of(cls, path: Path, put: Callable[[bytes], Any]) -> "Copy":
        """Reads all files, and gives each chunk to `put`, whose result is the chunk's reference."""
        digest = hashlib.sha256()
        files = []
        for name, file in files_at(path).items():
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            chunks = []
            for chunk in read_chunks(file):
                digest.update(chunk)
                chunks.append(put(chunk))
            files.append((name, tuple(chunks)))
        return cls(path.name, digest.hexdigest()[:16], tuple(files))

    def unpacked(self, cache: Path, get: Callable[[Any], bytes]) -> Path:
        """The file or folder of these contents in a cache, where it is made once, atomically.

        Raises `OSError`, one sentence, if the copy does not fit, and `ValueError` if the cache cannot be written.
        """

        folders = FolderCache(cache)

        def write(target: Path) -> None:
            folders.forget_unused(days=UNUSED_DAYS)
            for name, chunks in self.files:
                file = target / name
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as opened:
                    for chunk in chunks:
                        opened.write(get(chunk))

        with storage_errors(str(cache), f"takes no copy of {self.name}"):
            return folders.filled(self.digest, self.name, write)


def read_chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            yield chunk
