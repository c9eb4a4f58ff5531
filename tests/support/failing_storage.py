"""A storage that fails: this machine's files at `failing://`, but for those that match a pattern."""

import errno
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class ServerSilentError(Exception):
    """As a storage's library raises it: no `OSError`."""


class FailingStorage(LocalFileSystem):
    """Files that match `writes` cannot be written, for want of room; those that match `reads` cannot be read."""

    protocol = "failing"

    def __init__(self, *, writes: str = "", reads: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.writes, self.reads = writes, reads

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(str(path).removeprefix("failing://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        name = Path(path).name
        if "w" in mode and fnmatch(name, self.writes):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        if "r" in mode and fnmatch(name, self.reads):
            raise ServerSilentError("the server does not answer")
        return super()._open(path, mode, **options)


fsspec.register_implementation("failing", FailingStorage, clobber=True)
