"""`losses.jsonl` of a run: a line an update, written as they are done."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mbd_core.files import write_text

LOSSES = "losses.jsonl"


class CurveFile:
    """The curve of a run as lines in the folder or at the URL `folder`; `options` go to the storage's library.

    In a folder here each update is a line at once; an object store cannot append, so there the file is written whole
    whenever `flush` is called. Its first writing drops the updates that a restart repeats.
    """

    def __init__(
        self, folder: str, curve: list[dict[str, float]], *, options: Mapping[str, Any] | None = None
    ) -> None:
        self._system, path = fsspec.core.url_to_fs(folder, **(options or {}))
        self._file, self._is_here, self.curve = f"{path}/{LOSSES}", isinstance(self._system, LocalFileSystem), curve
        self._write()

    def flush(self) -> None:
        """Bring the file up to date where lines cannot be appended."""
        if not self._is_here:
            self._write()

    def append(self) -> None:
        """Add the curve's last update."""
        if self._is_here:
            with Path(self._file).open("a", encoding="utf-8") as file:
                file.write(_line(self.curve[-1]))

    def _write(self) -> None:
        text = "".join(map(_line, self.curve))
        if self._is_here:
            write_text(Path(self._file), text)
        else:
            self._system.pipe_file(self._file, text.encode())


def _line(point: dict[str, float]) -> str:
    return json.dumps(point) + "\n"
