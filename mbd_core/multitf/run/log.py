"""The output of a run under any launcher: printed progress, `losses.jsonl`, the targets of `--log-to`, `losses.png`.

Only the first worker has a log. Its files lie in the run's folder, here or at a URL.
"""

import io
import json
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from mbd_core.multitf.recipes.recipe import TrainingRecipe, as_recorded
from mbd_core.multitf.run.curve_file import LOSSES, CurveFile, Point
from mbd_core.multitf.run.log_targets import GuardedLog, RunLogger, default_targets, open_logs
from mbd_core.multitf.run.loss_plot import Points, draw_losses
from mbd_core.multitf.step.mfu import Peak, mfu
from mbd_core.storage.folder import Folder

PLOT, IDS, PAGE = "losses.png", "log_ids.json", "run.md"


class RunLog:
    """The log of a run that goes on from where `curve` ends; the trainer's loop adds points to `curve`.

    `targets` are the targets of `--log-to`; `None`: the default targets. `peak` is one worker's peak speed, for MFU.
    The loop calls `begin` before an update, `add` after it, `flush` before a checkpoint counts the update as done, and
    `close` at the end.
    """

    def __init__(
        self,
        folder: Folder,
        curve: list[Point],
        recipe: TrainingRecipe,
        *,
        peak: Peak,
        num_workers: int = 1,
        targets: Sequence[str] | None = None,
    ) -> None:
        self.curve, self.recipe, self.peak, self.num_workers = curve, recipe, peak, num_workers
        self.file, self._folder = CurveFile(folder, curve), folder
        choice, self._reason = default_targets() if targets is None else (tuple(targets), "")
        self._targets, self._start = choice, time.perf_counter()
        ids = self._ids()
        self._loggers = open_logs(
            choice,
            folder,
            start=len(curve),
            ids=ids,
            name=folder.name,
            settings=as_recorded(recipe),
        )
        if ids:
            folder.write_text(IDS, json.dumps(ids))
        for point in self.file.points if ids else ():  # services may lack numbers that a lost machine did not send
            self._send(point, to=[logger for logger in self._loggers if isinstance(logger, GuardedLog)])

    def describe(self) -> str:
        """The logs' places and the peak speed for MFU, for a line when the run begins."""
        places = ", ".join((LOSSES, *self._targets))
        return "; ".join(filter(None, (f"logs: {places}", self._reason, str(self.peak))))

    def write_page(self, changes: Sequence[str], *, num_workers: int, device: str) -> None:
        """Write `run.md`: the training, and its differences from the named recipe."""
        recipe, start = self.recipe, "random weights" if self.recipe.base is None else self.recipe.base
        differs = "\n".join(f"- {change}" for change in changes) or "Nothing: the recipe is trained as it stands."
        text = (
            f"# {recipe.name}\n\n{recipe.train.steps} updates of {recipe.train.batch_size} samples from {start} in "
            f"{recipe.train.precision}, by {num_workers} worker{'s' * (num_workers > 1)} on {device}. The recipe's "
            f"numbers: {recipe.source}.\n\n## What differs from the recipe\n\n{differs}\n\n## Losses\n\n"
            f"![losses]({PLOT}), in numbers: [{LOSSES}]({LOSSES})\n"
        )
        self._folder.write_text(PAGE, text)

    def begin(self) -> None:
        """Note that an update begins."""
        self._start = time.perf_counter()

    def add(self, *, beside: float = 0.0) -> None:
        """Log the update just done, the curve's last point; `beside` seconds of it went to other work."""
        point, seconds = self.curve[-1], max(time.perf_counter() - self._start - beside, 1e-9)
        speed = {"seconds": _short(seconds), "tokens_per_second": _short(point["tokens"] / seconds)}
        share = mfu(point["tflop"] * 1e12, seconds, self.peak, self.num_workers)
        if share is not None:
            speed["mfu"] = _short(share)
        self.file.append(**speed)
        self._send(self.file.points[-1], to=self._loggers)

    def amend(self, step: int, values: Point) -> None:
        """Log further numbers of update number `step`, which was logged before."""
        self.file.amend(step - 1, values)
        for logger in self._loggers:
            logger.amend(step - 1, values)

    def _send(self, point: Point, *, to: Sequence[RunLogger]) -> None:
        values = {name: number for name, number in point.items() if name != "step"}
        for logger in to:
            logger.add(int(point["step"]), values)

    def flush(self) -> None:
        """Bring files at URLs up to date."""
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
        image = io.BytesIO()
        draw_losses(self.file.points, image, title=self.recipe.name)
        self._folder.write_bytes(PLOT, image.getvalue())

    def _ids(self) -> dict[str, str]:
        ids = json.loads(self._folder.read_text(IDS) or "{}")
        assert isinstance(ids, dict)
        return ids


def _short(number: float) -> float:
    """A measured number, rounded to six digits."""
    return float(f"{number:.6g}")


# The printed lines of a run.

PROGRESS_SECONDS = 3.0
SHOWN_STEPS = 50
"""A progress bar shows means over the last `SHOWN_STEPS` updates."""


class Log:
    """The printed progress of the first worker, and the run's files if it has a folder.

    On a terminal it is a progress bar; otherwise a line every few seconds, with means over the updates since the last
    line, the speed, and the time left. The run's loop adds points to `curve`.
    """

    def __init__(self, curve: list[Point], steps: int, files: RunLog | None = None) -> None:
        self.curve, self.steps, self.files = curve, steps, files
        self._bar = tqdm(initial=len(curve), total=steps) if sys.stderr.isatty() else None
        self._last_time, self._num_shown, self._first = time.monotonic(), len(curve), len(curve) + 1

    def begin(self) -> None:
        """Note that an update begins."""
        if self.files is not None:
            self.files.begin()

    def add(self, *, beside: float = 0.0) -> None:
        """Log the update just done, the curve's last point; `beside` seconds of it went to other work."""
        if self.files is not None:
            self.files.add(beside=beside)
        if self._bar is not None:
            last_updates = self.curve[-SHOWN_STEPS:]
            means = {name: f"{_mean(last_updates, name):.4f}" for name in ("loss", "accuracy")}
            self._bar.set_postfix(means, lr=f"{last_updates[-1]['lr']:.2e}")
            self._bar.update()
        elif len(self.curve) in (self._first, self.steps) or time.monotonic() - self._last_time >= PROGRESS_SECONDS:
            self._say_progress()

    def amend(self, step: int, values: Point) -> None:
        """Add further numbers to update number `step`, which was logged before."""
        self.curve[step - 1] |= values
        if self.files is not None:
            self.files.amend(step, values)

    def _say_progress(self) -> None:
        new_updates, seconds = self.curve[self._num_shown :], time.monotonic() - self._last_time
        learned = "masked" if any(name.startswith("loss_slot") for name in new_updates[-1]) else "next"
        seconds_left = (self.steps - len(self.curve)) * seconds / len(new_updates)
        say(
            f"step {len(self.curve)}/{self.steps}  loss {_mean(new_updates, 'loss'):.4f}  "
            f"{learned}-token accuracy {_mean(new_updates, 'accuracy'):.3f}  lr {new_updates[-1]['lr']:.2e}  "
            f"{sum(point['tokens'] for point in new_updates) / seconds:,.0f} tokens/s  "
            f"ETA {seconds_left // 60:.0f} min {seconds_left % 60:02.0f} s"
        )
        self._last_time, self._num_shown = time.monotonic(), len(self.curve)

    def flush(self) -> None:
        """Bring remote storage up to date, before a checkpoint says that these updates are done."""
        if self.files is not None:
            self.files.flush()

    def close(self) -> None:
        """Finish the log."""
        if self._bar is not None:
            self._bar.close()
        if self.files is not None:
            self.files.close()


def say(line: str) -> None:
    """Print a line. Ray Train copies the output of `print` into a job's log, where each line would appear twice."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _mean(points: Points, name: str) -> float:
    return sum(point[name] for point in points) / len(points)
