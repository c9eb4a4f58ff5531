"""`losses.jsonl` of a run: a line an update, written as they are done; the update's point of the curve, and its speed.

Equal runs have equal points and never equal speeds: checkpoints hold the curve, and only this file the speeds.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mbd_core.files import write_text

LOSSES = "losses.jsonl"
SPEEDS = ("seconds", "tokens_per_second", "mfu")
"""An update's wall time, the tokens without padding that it computed in a second, its share of the devices' peak."""

Point = dict[str, float]


class CurveFile:
    """The curve of a run as lines in the folder or at the URL `folder`; `options` go to the storage's library.

    In a folder here each update is a line at once; an object store cannot append, so there the file is written whole
    whenever `flush` is called. Its first writing drops the updates that a restart repeats, and keeps the others'
    speeds. `points` are its lines.
    """

    def __init__(self, folder: str, curve: list[Point], *, options: Mapping[str, Any] | None = None) -> None:
        self._system, path = fsspec.core.url_to_fs(folder, **(options or {}))
        self._file, self._is_here, self.curve = f"{path}/{LOSSES}", isinstance(self._system, LocalFileSystem), curve
        speeds = self._speeds()
        self.points: list[Point] = [point | speeds.get(point["step"], {}) for point in curve]
        self._write()

    def flush(self) -> None:
        """Bring the file up to date where lines cannot be appended."""
        if not self._is_here:
            self._write()

    def append(self, **speed: float) -> None:
        """Add the curve's last update, with its speed."""
        self.points.append(self.curve[-1] | speed)
        if self._is_here:
            with Path(self._file).open("a", encoding="utf-8") as file:
                file.write(_line(self.points[-1]))

    def _speeds(self) -> dict[float, Point]:
        """The speeds of the updates that are in the file, by their steps."""
        found: dict[float, Point] = {}
        with suppress(FileNotFoundError):
            for line in self._system.cat_file(self._file).decode("utf-8", errors="replace").splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a line that a lost machine cut
                    point = json.loads(line)
                    found[point["step"]] = {name: point[name] for name in SPEEDS if name in point}
        return found

    def _write(self) -> None:
        text = "".join(map(_line, self.points))
        if self._is_here:
            write_text(Path(self._file), text)
        else:
            self._system.pipe_file(self._file, text.encode())


def _line(point: Point) -> str:
    return json.dumps(point) + "\n"
