"""What a run logs, whoever launched it: `losses.jsonl`, the targets of `--log-to`, and `losses.png` at its end.

Only the first worker has a log. All of it lies in the run's folder, here or at a URL.
"""

import io
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mbd_core.files import file_beside
from mbd_core.multitf.curve_file import LOSSES, CurveFile, Point
from mbd_core.multitf.log_targets import GuardedLog, RunLogger, default_targets, open_logs
from mbd_core.multitf.loss_plot import draw_losses
from mbd_core.multitf.training_flops import Peak, mfu
from mbd_core.multitf.training_recipe import TrainingRecipe, as_recorded

PLOT, IDS = "losses.png", "log_ids.json"


class RunLog:
    """The log of a run that goes on from where `curve` ends; the trainer's loop adds points to `curve`.

    `targets`: `None` is the default's. `peak` is one worker's. `options` go to the storage's library. `begin` is
    called before an update and `add` after it, `flush` before a checkpoint says that it is done, `close` at the end.
    """

    def __init__(
        self,
        folder: str,
        curve: list[Point],
        recipe: TrainingRecipe,
        *,
        peak: Peak,
        num_workers: int = 1,
        targets: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.curve, self.recipe, self.peak, self.num_workers = curve, recipe, peak, num_workers
        self.file = CurveFile(folder, curve, options=options)
        self._system, self._path = fsspec.core.url_to_fs(folder, **(options or {}))
        self._is_here = isinstance(self._system, LocalFileSystem)
        chosen, self._reason = default_targets() if targets is None else (tuple(targets), "")
        self._targets, self._began = chosen, time.perf_counter()
        ids = self._ids()
        self._loggers = open_logs(
            chosen,
            folder,
            start=len(curve),
            ids=ids,
            name=self._path.rpartition("/")[2],
            settings=as_recorded(recipe),
            options=options or {},
        )
        if ids:
            self._system.pipe_file(f"{self._path}/{IDS}", json.dumps(ids).encode())
        for point in self.file.points if ids else ():  # services may lack what a lost machine did not send
            self._send(point, to=[logger for logger in self._loggers if isinstance(logger, GuardedLog)])

    def describe(self) -> str:
        """Where the numbers go and what MFU is measured against, for the line that a run begins with."""
        places = ", ".join((LOSSES, *self._targets))
        return "; ".join(filter(None, (f"logs: {places}", self._reason, str(self.peak))))

    def begin(self) -> None:
        """An update begins."""
        self._began = time.perf_counter()

    def add(self) -> None:
        """Log the update that was just done, the curve's last point."""
        point, seconds = self.curve[-1], max(time.perf_counter() - self._began, 1e-9)
        speed = {"seconds": _short(seconds), "tokens_per_second": _short(point["tokens"] / seconds)}
        share = mfu(point["tflop"] * 1e12, seconds, self.peak, self.num_workers)
        if share is not None:
            speed["mfu"] = _short(share)
        self.file.append(**speed)
        self._send(self.file.points[-1], to=self._loggers)

    def _send(self, point: Point, *, to: Sequence[RunLogger]) -> None:
        values = {name: number for name, number in point.items() if name != "step"}
        for logger in to:
            logger.add(int(point["step"]), values)

    def flush(self) -> None:
        """Bring what lies at URLs up to date."""
        self.file.flush()
        for logger in self._loggers:
            logger.flush()

    def close(self) -> None:
        """Finish the logs, and draw the plot."""
        self.file.flush()
        for logger in self._loggers:
            logger.close()
        if not self.file.points:
            return
        if self._is_here:
            with file_beside(Path(self._path) / PLOT) as beside:
                draw_losses(self.file.points, beside, title=self.recipe.name)
        else:
            image = io.BytesIO()
            draw_losses(self.file.points, image, title=self.recipe.name)
            self._system.pipe_file(f"{self._path}/{PLOT}", image.getvalue())

    def _ids(self) -> dict[str, str]:
        with suppress(FileNotFoundError):
            ids = json.loads(self._system.cat_file(f"{self._path}/{IDS}"))
            assert isinstance(ids, dict)
            return ids
        return {}


def _short(number: float) -> float:
    """Six digits of a measured number."""
    return float(f"{number:.6g}")
