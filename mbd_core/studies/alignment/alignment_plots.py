"""The plots of training against inference: mask ratios by slot (Fig. 2 A-C), and running-set sizes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mbd_core.studies.alignment.compared_schedules import ComparedModel
from mbd_core.studies.alignment.distances import NUM_BINS
from mbd_core.studies.alignment.running_states import States

COLUMNS = 3
SHOWN_SLOTS = 4


def draw_alignment(models: Sequence[ComparedModel], folder: Path) -> list[str]:
    """Write all PNG files into `folder`; returns their names."""
    figures = {"slot_ratios.png": _slot_ratios(models), "running_sets.png": _running_sets(models)}
    for name, figure in figures.items():
        figure.savefig(folder / name, format="png", dpi=130)
    return list(figures)


def _slot_ratios(models: Sequence[ComparedModel]) -> Figure:
    """A panel for each schedule, over the last model's problems, then one for each model's inference."""
    drawn = [(f"training: {s.name}", s.states) for s in models[-1].schedules]
    drawn += [(f"inference: {m.name}", m.inference) for m in models]
    rows = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(4.6 * COLUMNS, 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for (title, states), panel in zip(drawn, panels, strict=False):
        _outlines(panel, states)
        panel.set_title(f"{title} (n={len(states)})", fontsize="medium")
    for panel in panels[len(drawn) :]:
        panel.set_axis_off()
    return figure


def _outlines(panel: Axes, states: States) -> None:
    """The mask ratios of each slot as a filled outline."""
    for slot in range(min(SHOWN_SLOTS, states.ratios_SN.shape[1])):
        values = states.ratios_SN[:, slot]
        values = values[~np.isnan(values)]
        shares, edges = np.histogram(values, bins=NUM_BINS, range=(0.0, 1.0))
        label = f"slot {slot + 1} (mean {values.mean():.2f})"
        panel.stairs(shares / len(values), edges, color=f"C{slot}", fill=True, alpha=0.25)
        panel.stairs(shares / len(values), edges, color=f"C{slot}", linewidth=1.6, label=label)
    panel.set_xlabel("mask ratio")
    panel.set_ylabel("share of states")
    panel.legend(fontsize="small")
    panel.grid(alpha=0.3)


def _running_sets(models: Sequence[ComparedModel]) -> Figure:
    """For each model the sizes of its running-sets beside those of each schedule's noise-groups."""
    figure = Figure(figsize=(6.4 * len(models), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for model, panel in zip(models, figure.subplots(1, len(models), squeeze=False)[0], strict=True):
        sides = [("inference", model.inference), *((s.name, s.states) for s in model.schedules)]
        largest = max(states.ratios_SN.shape[1] for _, states in sides)
        width = 0.8 / len(sides)
        for number, (name, states) in enumerate(sides):
            shares = np.bincount(states.sizes_S, minlength=largest + 1)[1:] / len(states)
            at = np.arange(1, largest + 1) + (number - (len(sides) - 1) / 2) * width
            panel.bar(at, shares, width=width, label=name, color="black" if number == 0 else f"C{(number - 1) % 10}")
        panel.set_title(f"{model.name}: blocks decoded together", fontsize="medium")
        panel.set_xticks(range(1, largest + 1))
        panel.set_xlabel("size of the running-set or noise-group")
        panel.set_ylabel("share of states")
        panel.legend(fontsize="x-small")
        panel.grid(alpha=0.3, axis="y")
    return figure
