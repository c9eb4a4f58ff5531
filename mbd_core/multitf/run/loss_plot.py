"""The plot of a run: its loss, by slot and by mask ratio too, the gradients' norm, the learning rate, the speed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mbd_core.multitf.step.loss_buckets import BUCKETS

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
"""Okabe and Ito's colours, which the colour-blind tell apart; lines differ in their dashes too."""
DASHES = ("-", "--", "-.", ":")
WINDOWS = 20
"""A moving mean covers one part in `WINDOWS` of a run, at most 100 updates."""
SINGLE = {"grad_norm": "gradient norm, before clipping", "lr": "learning rate", "tokens_per_second": "tokens/s"}

SWEEP_PANELS = {"sweep_accuracy": "accuracy of sweeps", "sweep_tpf": "TPF of sweeps"}

Points = Sequence[Mapping[str, float]]


def moving_mean(values: Sequence[float], window: int) -> np.ndarray:
    """For each value, the mean of the last `window` values up to it."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_losses(points: Points, path: Path | BinaryIO, *, title: str) -> None:
    """Write the plot of a run's points, at least one, as PNG."""
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
    """A marker if there is only one update, which draws no line."""
    return "o" if len(steps) == 1 else None
