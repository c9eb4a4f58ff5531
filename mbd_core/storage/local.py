"""A folder of this machine."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from mbd_core.files import (
    PartsFolder,
    check_target_folder,
    check_writable,
    durable_file,
    is_partial,
    naming,
    write_text,
)
from mbd_core.storage.errors import storage_errors


@dataclass(frozen=True)
class LocalPlace:
    """A folder at an absolute path; its methods are described in `Folder`."""

    path: Path

    @property
    def options(self) -> Mapping[str, Any]:
        return {}

    def exists(self) -> bool:
        return self.path.exists()

    def read_bytes(self, name: str) -> bytes | None:
        file = self.path / name
        return file.read_bytes() if file.exists() else None

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def files(self, pattern: str) -> list[str]:
        paths = (path for path in self.path.glob(pattern) if path.is_file() and not is_partial(path))
        return [str(path.relative_to(self.path)) for path in paths]

    @contextmanager
    def local_file(self, name: str) -> Iterator[Path]:
        yield self.path / name

    def check_writable(self) -> None:
        with storage_errors(str(self.path), "cannot be written", ValueError):
            check_writable(self.path if self.path.is_dir() else self.path.parent, self.path)

    def check_target(self, kind: str, *, overwrite: bool, in_place: bool) -> None:
        with storage_errors(str(self.path), "cannot be written", ValueError):
            check_target_folder(self.path, kind, overwrite=overwrite, in_place=in_place)

    def write_bytes(self, name: str, content: bytes) -> None:
        with self.staged_file(name) as new_file:
            new_file.write_bytes(content)

    def write_file(self, name: str, source: Path) -> None:
        with self.staged_file(name) as new_file:
            shutil.copyfile(source, new_file)

    def staged_file(self, name: str) -> AbstractContextManager[Path]:
        return durable_file(self.path / name)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def claim(self, kind: str, files: Sequence[str], *, lock: str) -> "LocalClaim":
        return LocalClaim(PartsFolder(self.path, kind, files, lock=lock))

    def growing(self, name: str) -> "LocalText":
        return LocalText(self.path / name)

    def workspace(self) -> "LocalMirror":
        return LocalMirror(self.path)

    @contextmanager
    def staged(self, kind: str, *, overwrite: bool, keep: bool) -> Iterator[Path]:
        yield self.path

    @contextmanager
    def mirrored(self, kind: str, files: Sequence[str]) -> Iterator["LocalMirror"]:
        self.check_writable()
        yield LocalMirror(self.path)

    def fetch(self, cache: Path, *, stubs: Path | None = None) -> Path:
        return self.path

    def filesystem(self) -> tuple[Any, str]:
        return LocalFileSystem(), str(self.path)


@dataclass(frozen=True)
class LocalText:
    """A file to which lines are appended at once."""

    file: Path

    def replace(self, text: str) -> None:
        write_text(self.file, text)

    def append(self, line: str) -> None:
        with naming(self.file), self.file.open("a", encoding="utf-8") as file:
            file.write(line)

    def flush(self) -> None:
        """Nothing to do: `append` writes each line at once."""


@dataclass(frozen=True)
class LocalClaim:
    """A folder that is locked."""

    parts: PartsFolder

    def check(self) -> None:
        """Nothing to do: this process holds the lock until `close`."""

    def close(self) -> None:
        self.parts.close()


@dataclass(frozen=True)
class LocalMirror:
    """A folder that is written in its own place."""

    path: Path

    def publish(self, name: str) -> None:
        """Nothing to do: the file was written in its place."""

    def flush(self) -> None:
        """Nothing to do: all files were written in their place."""

    def close(self) -> None:
        """Nothing to do: the folder is in its place."""
