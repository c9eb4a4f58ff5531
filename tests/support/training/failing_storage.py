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
    """Files that match `writes` cannot be written, for want of room, or beyond `room` bytes; those that match `reads`
    cannot be read."""

    protocol = "failing"

    def __init__(self, *, writes: str = "", reads: str = "", room: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.writes, self.reads, self.room = writes, reads, room

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(str(path).removeprefix("failing://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        name = Path(path).name
        if "w" in mode and fnmatch(name, self.writes):
            return self._open_on_full_disk(path, mode, **options)
        if "r" in mode and fnmatch(name, self.reads):
            raise ServerSilentError("the server does not answer")
        return super()._open(path, mode, **options)

    def _open_on_full_disk(self, path: str, mode: str, **options: Any) -> Any:
        full = OSError(errno.ENOSPC, "No space left on device", path)
        if not self.room:
            raise full
        file = super()._open(path, mode, **options)
        write = file.write

        def write_while_there_is_room(content: Any) -> int:
            if file.tell() + len(content) > self.room:
                raise full
            return int(write(content))

        file.write = write_while_there_is_room
        return file


fsspec.register_implementation("failing", FailingStorage, clobber=True)
