"""`losses.jsonl` of a run: for each update, when it is done, a line with its point of the curve and its speed.

Equal runs have equal points and never equal speeds: checkpoints hold the curve, and only this file the speeds.
"""

import json
from contextlib import suppress

from mbd_core.storage.folder import Folder

LOSSES = "losses.jsonl"
SPEEDS = ("seconds", "tokens_per_second", "mfu")
"""An update's wall time, the tokens without padding that it computed in a second, its share of the devices' peak."""

SWEEP = "sweep_"  # the prefix of a sweep's numbers, which come after their update

Point = dict[str, float]


class CurveFile:
    """The curve of a run as lines of a file in its folder; `points` are its lines.

    An update is written at once, or at the next `flush` if the storage cannot append. The first writing of the file
    drops the updates that a restart repeats, and keeps the speeds and sweeps of the other updates.
    """

    def __init__(self, folder: Folder, curve: list[Point]) -> None:
        self._file, self.curve = folder.growing(LOSSES), curve
        earlier_points = _earlier_points(folder)
        self.points: list[Point] = [point | earlier_points.get(point["step"], {}) for point in curve]
        for update, point in zip(curve, self.points, strict=True):
            update |= {name: number for name, number in point.items() if name.startswith(SWEEP)}
        self._write()

    def flush(self) -> None:
        """Bring the file up to date if lines cannot be appended."""
        self._file.flush()

    def append(self, **speed: float) -> None:
        """Add the curve's last update, with its speed."""
        self.points.append(self.curve[-1] | speed)
        self._file.append(_line(self.points[-1]))

    def amend(self, place: int, values: Point) -> None:
        """Add numbers to the update at this place."""
        self.points[place] |= values
        self._write()

    def _write(self) -> None:
        self._file.replace("".join(map(_line, self.points)))


def _earlier_points(folder: Folder) -> dict[float, Point]:
    """The speeds and sweeps of the updates that are in a run's file, by their steps."""
    values_by_step: dict[float, Point] = {}
    for line in (folder.read_bytes(LOSSES) or b"").decode("utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a line that a lost machine cut
            point = json.loads(line)
            values = {name: point[name] for name in point if name in SPEEDS or name.startswith(SWEEP)}
            values_by_step[point["step"]] = values
    return values_by_step


def _line(point: Point) -> str:
    return json.dumps(point) + "\n"
