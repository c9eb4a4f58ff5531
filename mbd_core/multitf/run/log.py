"""What a run prints and logs under any launcher: progress, `losses.jsonl`, the targets of `--log-to`, `losses.png`.

Only the first worker has a log. Its files lie in the run's folder, here or at a URL.
"""

import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tqdm import tqdm

from mbd_core.multitf.recipes.recipe import TrainingRecipe, as_recorded
from mbd_core.multitf.run.log_targets import GuardedLog, RunLogger, default_targets, open_logs
from mbd_core.multitf.step.loss_buckets import BUCKETS
from mbd_core.multitf.step.mfu import Peak, mfu
from mbd_core.storage.folder import Folder

# `losses.jsonl` of a run: a line an update, written as they are done; the update's point of the curve, and its speed.
#
# Equal runs have equal points and never equal speeds: checkpoints hold the curve, and only this file the speeds.

LOSSES = "losses.jsonl"
SPEEDS = ("seconds", "tokens_per_second", "mfu")
"""An update's wall time, the tokens without padding that it computed in a second, its share of the devices' peak."""

SWEEP = "sweep_"  # how the names of a sweep's numbers begin, which come after their update

Point = dict[str, float]


class CurveFile:
    """The curve of a run as lines of a file in its folder; `points` are its lines.

    Each update is a line at once, or, where the storage cannot append, whenever `flush` is called. The file's first
    writing drops the updates that a restart repeats, and keeps the others' speeds and sweeps.
    """

    def __init__(self, folder: Folder, curve: list[Point]) -> None:
        self._file, self.curve = folder.growing(LOSSES), curve
        earlier_points = _earlier_points(folder)
        self.points: list[Point] = [point | earlier_points.get(point["step"], {}) for point in curve]
        for update, point in zip(curve, self.points, strict=True):
            update |= {name: number for name, number in point.items() if name.startswith(SWEEP)}
        self._write()

    def flush(self) -> None:
        """Bring the file up to date where lines cannot be appended."""
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


# The plot of a run: its loss, by slot and by mask ratio too, the gradients' norm, the learning rate, the speed.

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
"""Okabe and Ito's, which the colour-blind tell apart; lines differ in their dashes too."""
DASHES = ("-", "--", "-.", ":")
WINDOWS = 20
"""A moving mean covers one part in `WINDOWS` of a run, at most 100 updates."""
SINGLE = {"grad_norm": "gradient norm, before clipping", "lr": "learning rate", "tokens_per_second": "tokens/s"}

SWEEP_PANELS = {"sweep_accuracy": "accuracy of sweeps", "sweep_tpf": "TPF of sweeps"}

Points = Sequence[Mapping[str, float]]


def moving_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Of each value the mean of it and of those before it, `window` at most."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_losses(points: Points, path: Path | BinaryIO, *, title: str) -> None:
    """Write the plot of a run's points, of which there is at least one, as PNG."""
    singles = SINGLE | {name: label for name, label in SWEEP_PANELS.items() if any(name in point for point in points)}
    columns = 3 if len(singles) == len(SINGLE) else 4
    figure = Figure(figsize=(5.0 * columns, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: {len(points)} updates")
    panels = figure.subplots(2, columns).ravel()
    window = max(1, min(100, len(points) // WINDOWS))
    _raw_and_mean(panels[0], points, "loss", window)
    steps, losses = _steps_and_values(points, "validation_loss")
    if steps:
        panels[0].plot(steps, losses, color=COLOURS[2], linestyle="--", marker="o", label="held-out data")
        panels[0].legend(fontsize="small")
    panels[0].set_title(f"loss, and its mean over {window} updates", fontsize="medium")
    for panel, start, axis in ((panels[1], "loss_slot_", "slot"), (panels[2], "loss_ratio_", "mask ratio (%)")):
        _means(panel, points, [name for name in BUCKETS if name.startswith(start)], start, window)
        panel.set_title(f"loss of a label, by {axis}", fontsize="medium")
    for panel, (name, label) in zip(panels[3:], singles.items(), strict=True):
        _raw_and_mean(panel, points, name, 1 if name in ("lr", *SWEEP_PANELS) else window)
        panel.set_title(label, fontsize="medium")
    for panel in panels:
        panel.set_xlabel("update")
        panel.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=110)


def _steps_and_values(points: Points, name: str) -> tuple[list[float], list[float]]:
    """The updates that have this number, counted from 1, and their numbers."""
    steps_and_values = [(point["step"] + 1, point[name]) for point in points if name in point]
    return [step for step, _ in steps_and_values], [value for _, value in steps_and_values]


def _raw_and_mean(panel: Axes, points: Points, name: str, window: int) -> None:
    steps, values = _steps_and_values(points, name)
    smooth = window > 1
    panel.plot(steps, values, color=COLOURS[0], alpha=0.3 if smooth else 1.0, linewidth=1.0, marker=_marker(steps))
    if smooth:
        panel.plot(steps, moving_mean(values, window), color=COLOURS[1], linewidth=1.8)


def _means(panel: Axes, points: Points, names: Sequence[str], start: str, window: int) -> None:
    for number, name in enumerate(names):
        steps, values = _steps_and_values(points, name)
        if steps:
            panel.plot(
                steps,
                moving_mean(values, window),
                color=COLOURS[number % len(COLOURS)],
                linestyle=DASHES[number % len(DASHES)],
                marker=_marker(steps),
                label=name.removeprefix(start).replace("_", " to "),
            )
    if panel.lines:
        panel.legend(fontsize="small")


def _marker(steps: Sequence[float]) -> str | None:
    """One update alone is no line."""
    return "o" if len(steps) == 1 else None


PLOT, IDS, PAGE = "losses.png", "log_ids.json", "run.md"


class RunLog:
    """The log of a run that goes on from where `curve` ends; the trainer's loop adds points to `curve`.

    `targets`: `None` is the default's. `peak` is one worker's. `begin` is called before an update and
    `add` after it, `flush` before a checkpoint says that it is done, `close` at the end.
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
        for point in self.file.points if ids else ():  # services may lack what a lost machine did not send
            self._send(point, to=[logger for logger in self._loggers if isinstance(logger, GuardedLog)])

    def describe(self) -> str:
        """Where the numbers go and what MFU is measured against, for the line that a run begins with."""
        places = ", ".join((LOSSES, *self._targets))
        return "; ".join(filter(None, (f"logs: {places}", self._reason, str(self.peak))))

    def write_page(self, changes: Sequence[str], *, num_workers: int, device: str) -> None:
        """Write what is trained and what differs in it from the recipe that was named, as `run.md`."""
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
        """An update begins."""
        self._start = time.perf_counter()

    def add(self, *, beside: float = 0.0) -> None:
        """Log the update that was just done, the curve's last point; `beside` are seconds that were no part of it."""
        point, seconds = self.curve[-1], max(time.perf_counter() - self._start - beside, 1e-9)
        speed = {"seconds": _short(seconds), "tokens_per_second": _short(point["tokens"] / seconds)}
        share = mfu(point["tflop"] * 1e12, seconds, self.peak, self.num_workers)
        if share is not None:
            speed["mfu"] = _short(share)
        self.file.append(**speed)
        self._send(self.file.points[-1], to=self._loggers)

    def amend(self, step: int, values: Point) -> None:
        """Log numbers of the update that `step` updates ended with, which came later."""
        self.file.amend(step - 1, values)
        for logger in self._loggers:
            logger.amend(step - 1, values)

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
        image = io.BytesIO()
        draw_losses(self.file.points, image, title=self.recipe.name)
        self._folder.write_bytes(PLOT, image.getvalue())

    def _ids(self) -> dict[str, str]:
        ids = json.loads(self._folder.read_text(IDS) or "{}")
        assert isinstance(ids, dict)
        return ids


def _short(number: float) -> float:
    """Six digits of a measured number."""
    return float(f"{number:.6g}")


# What a run prints.

PROGRESS_SECONDS = 3.0
SHOWN_STEPS = 50
"""A progress bar shows means over the last `SHOWN_STEPS` updates."""


class Log:
    """What the first worker prints as updates are done, and the run's files if it has a folder.

    On a terminal a progress bar; else a line every few seconds, with means over the updates since the line before, the
    speed, and the time left. `curve` is the run's, to which its loop adds points.
    """

    def __init__(self, curve: list[Point], steps: int, files: RunLog | None = None) -> None:
        self.curve, self.steps, self.files = curve, steps, files
        self._bar = tqdm(initial=len(curve), total=steps) if sys.stderr.isatty() else None
        self._last_time, self._num_shown, self._first = time.monotonic(), len(curve), len(curve) + 1

    def begin(self) -> None:
        """An update begins."""
        if self.files is not None:
            self.files.begin()

    def add(self, *, beside: float = 0.0) -> None:
        """Log the update that was just done, the curve's last point; `beside` are seconds that were no part of it."""
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
        """Add numbers to the update that `step` updates ended with, which came later."""
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
    """Print a line. Ray Train gives `print` a second way to a job's log, where every line would stand twice."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _mean(points: Points, name: str) -> float:
    return sum(point[name] for point in points) / len(points)
