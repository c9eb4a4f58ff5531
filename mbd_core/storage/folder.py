"""Folders here or on remote storage: run folders, models and reports at any URL that fsspec knows.

A `Folder` is an absolute path, or a URL such as `s3://bucket/path`. Credentials and endpoint come from the
environment, as the storage's own library takes them (for S3 `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
`AWS_ENDPOINT_URL`).

The rules of `mbd_core.files` hold for both: a folder that exists is refused before any work, and replaced only if its
manifest says that the project wrote all of it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fsspec
import pyarrow.fs
from fsspec.implementations.local import LocalFileSystem

from mbd_core.files import MANIFEST, manifest_kind
from mbd_core.storage.local import LocalPlace
from mbd_core.storage.remote import RemotePlace

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
JOB_COPY = "working_dir_files"  # the folder of Ray's copies of a submitted job's working directory


class GrowingText(Protocol):
    """A text file that is written line by line. Where lines cannot be appended, `flush` writes the whole file."""

    def replace(self, text: str) -> None:
        """Write the file anew, completely or not at all."""

    def append(self, line: str) -> None: ...
    def flush(self) -> None: ...


class Workspace(Protocol):
    """A folder in which a library writes files of its own, at `path`, on this machine.

    `flush` uploads the files of a remote folder; `close` removes them from this machine.
    """

    @property
    def path(self) -> Path: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Mirror(Protocol):
    """A folder that fills file by file: its files are written at `path`, on this machine, and appear at their place.

    A remote folder has the manifest of an unfinished folder until the mirror is closed.
    """

    @property
    def path(self) -> Path: ...

    def publish(self, name: str) -> None:
        """Show at the folder's place that a file was written, or removed. Raises `OSError`."""

    def close(self) -> None:
        """Say that the folder is complete."""


class FolderClaim(Protocol):
    """One process's right to write in a folder.

    A local folder is locked, and a later process is refused. A remote folder cannot be locked, because a killed
    process would keep the lock for ever: a later process takes the folder over.
    """

    def check(self) -> None:
        """Raises `TakenOver` if another process has taken the folder over."""

    def close(self) -> None:
        """Let another process write there."""


@dataclass(frozen=True)
class Folder:
    """A folder, which need not exist. `location` is an absolute path or a URL; `Folder.at` reads a user's text."""

    location: str

    def __post_init__(self) -> None:
        assert self.is_remote or os.path.isabs(self.location), self.location

    @classmethod
    def at(cls, text: str | Path) -> "Folder":
        """The folder that a user names by a path or a URL; `file://` is a path.

        Raises `ValueError` for an empty name, for a scheme that is not known or whose package is missing, and for a
        relative path in a submitted job, whose working directory is a copy that goes with the job.
        """
        text = str(text)
        if not text.strip():
            raise ValueError("an empty name is no folder; give a path, or a URL as s3://bucket/path")
        scheme = SCHEME.match(text)
        if scheme is not None and scheme[1].lower() not in ("file", "local"):
            _check_scheme(text, scheme[1])
            path = text[scheme.end() :].rstrip("/")
            if not path:
                raise ValueError(f"{text} names no folder; give one as {scheme[0]}bucket/path")
            return cls(scheme[0].lower() + path)
        local_path = Path(text) if scheme is None else Path(LocalFileSystem._strip_protocol(text))
        if not local_path.is_absolute() and JOB_COPY in Path.cwd().parts:
            raise ValueError(
                f"{text} is relative, and a submitted job runs in a copy of its working directory that is removed "
                "afterwards; give an absolute path or a URL"
            )
        return cls(os.path.abspath(local_path))

    def __str__(self) -> str:
        return self.location

    def __truediv__(self, name: str) -> "Folder":
        return Folder(f"{self.location.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.location.rpartition("/")[2]

    @property
    def _place(self) -> LocalPlace | RemotePlace:
        return RemotePlace(self.location) if self.is_remote else LocalPlace(Path(self.location))

    @property
    def is_remote(self) -> bool:
        return SCHEME.match(self.location) is not None

    @property
    def is_shared(self) -> bool:
        """Whether other processes see files that are written there; `memory://` is each process's own."""
        return not self.location.startswith("memory://")

    @property
    def path(self) -> Path:
        """A local folder's path."""
        assert not self.is_remote, self.location
        return Path(self.location)

    def holds(self, other: "Folder") -> bool:
        """Whether `other` is this folder or lies in it."""
        return f"{other.location}/".startswith(f"{self.location.rstrip('/')}/")

    # Reading

    def exists(self) -> bool:
        """Whether anything lies there."""
        return self._place.exists()

    def read_bytes(self, name: str) -> bytes | None:
        """A file's content; `None` if there is no such file."""
        return self._place.read_bytes(name)

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return self._place.has(name)

    def files(self, pattern: str) -> list[str]:
        """The sorted names of the files that match a pattern such as `rollouts/*/part-*.parquet`.

        A `*` does not reach into folders, and the pattern's last part is a file's.
        """
        return sorted(self._place.files(pattern))

    def kind(self) -> str | None:
        """The kind of the folder by its manifest; `None` if the project did not write it."""
        return manifest_kind(self.read_text(MANIFEST))

    def read_text(self, name: str) -> str | None:
        """A file's text; `None` if there is no such file."""
        content = self.read_bytes(name)
        return None if content is None else content.decode("utf-8")

    def local_file(self, name: str) -> AbstractContextManager[Path]:
        """A path of this machine at which an existing file can be read: its own path, or the path of a temporary
        copy."""
        return self._place.local_file(name)

    def fetch(self, cache: Path, *, stubs: Path | None = None) -> Path:
        """A folder of this machine with these files.

        A local folder is its own path. A remote folder is downloaded to a folder of the same name below `cache`, once
        for each version: sizes, times and checksums of the files, as the storage reports them. Raises `ValueError` if
        nothing lies at the URL, if the folder is unfinished, or if it changes during the download. The copy is
        complete or missing.

        With `stubs`, another cache, a version that `cache` lacks is downloaded to `stubs`, with stubs in the place of
        its safetensors (`streamed.py`). A server that cannot send parts of files excludes this.
        """
        return self._place.fetch(cache, stubs=stubs)

    # Writing

    def check_writable(self) -> None:
        """Raise `ValueError` if no file can be made in the folder; on remote storage a file is made and removed."""
        self._place.check_writable()

    def check_target(self, kind: str, *, overwrite: bool = False, in_place: bool = False) -> None:
        """Raise `ValueError` if a folder of `kind` cannot be written here, as `files.check_target_folder` does."""
        self._place.check_target(kind, overwrite=overwrite, in_place=in_place)

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file, completely or not at all. Raises `OSError`."""
        self._place.write_bytes(name, content)

    def write_text(self, name: str, text: str) -> None:
        """Write a text file, completely or not at all. Raises `OSError`."""
        self.write_bytes(name, text.encode("utf-8"))

    def write_file(self, name: str, source: Path) -> None:
        """Copy a file of this machine here, completely or not at all. Raises `OSError`."""
        self._place.write_file(name, source)

    def staged_file(self, name: str) -> AbstractContextManager[Path]:
        """A path of this machine at which the body writes a file: beside its place, or to be uploaded.

        The complete file appears if the body succeeds, and no file if it fails. Raises `OSError`.
        """
        return self._place.staged_file(name)

    def remove(self, name: str) -> None:
        """Remove a file if it is there. Raises `OSError`."""
        self._place.remove(name)

    def growing(self, name: str) -> GrowingText:
        """A file that is written line by line."""
        return self._place.growing(name)

    def workspace(self) -> Workspace:
        """A place where a library writes files of its own for this folder. The caller closes it."""
        return self._place.workspace()

    def staged(self, kind: str, *, overwrite: bool = False, keep: bool = False) -> AbstractContextManager[Path]:
        """The path at which this folder is written: its own, or a temporary folder that is uploaded at the end.

        The written folder must have its manifest (`mbd_core.files`). With `keep` the temporary folder stays if the
        body or the upload fails. Raises `ValueError` as `check_target` does, and `OSError` if the upload fails.
        """
        return self._place.staged(kind, overwrite=overwrite, keep=keep)

    def claim(self, kind: str, files: Sequence[str], *, lock: str) -> FolderClaim:
        """Make the folder for files that are written one by one, and be their only writer.

        `files` are patterns of their names; files that exist already stay. `lock`, one of `files`, is the name of the
        file that shows the claim to other processes. The caller closes the claim. Raises `ValueError` as
        `check_target` does, and if another process has locked a local folder.
        """
        return self._place.claim(kind, files, lock=lock)

    def mirrored(self, kind: str, files: Sequence[str]) -> AbstractContextManager[Mirror]:
        """A place where this folder, claimed by `mbd_core.files.claim_folder`, is written file by file.

        It is the folder's own path. For a remote folder it is a temporary folder, which begins with the existing files
        that match `files`, patterns of names. Raises `ValueError` if the folder cannot be written, or is of another
        kind than `kind`.
        """
        return self._place.mirrored(kind, files)

    # For libraries

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments of fsspec's filesystem for this folder."""
        return self._place.options

    def filesystem(self) -> tuple[Any, str]:
        """fsspec's filesystem, and this folder's path on it."""
        return self._place.filesystem()

    def for_ray(self) -> tuple[str, "pyarrow.fs.FileSystem | None"]:
        """`storage_path` and `storage_filesystem` of Ray Train; without the latter it writes to a local path."""
        system, path = self.filesystem()
        return path, pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(system)) if self.is_remote else None


def _check_scheme(url: str, scheme: str) -> None:
    """Raise `ValueError` for a scheme that fsspec does not know, or whose package is not installed."""
    try:
        fsspec.get_filesystem_class(scheme.lower())
    except ImportError as error:
        hint = "install mbd-cluster[s3]" if scheme.lower() in ("s3", "s3a") else str(error)
        raise ValueError(f"{url} needs a package that is not installed: {hint}") from error
    except ValueError:
        raise ValueError(
            f"{url} cannot be reached: unknown scheme '{scheme}'; give a path, or a URL as s3://..."
        ) from None
