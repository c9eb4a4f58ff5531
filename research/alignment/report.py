"""The report on training against inference: tables over models and schedules, JSON, plots and the fitted noise."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mbd_core.evaluation.measures.statistics import Interval
from mbd_core.files import write_json, write_text
from mbd_core.multitf.states.fitted_noise import write_noise
from research.alignment.distances import LEAST_STATES, NUM_BINS, ComparedModel
from research.alignment.states import States
from research.tables import table_lines

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
    panels_states = [(f"training: {s.name}", s.states) for s in models[-1].schedules]
    panels_states += [(f"inference: {m.name}", m.inference) for m in models]
    rows = -(-len(panels_states) // COLUMNS)
    figure = Figure(figsize=(4.6 * COLUMNS, 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for (title, states), panel in zip(panels_states, panels, strict=False):
        _outlines(panel, states)
        panel.set_title(f"{title} (n={len(states)})", fontsize="medium")
    for panel in panels[len(panels_states) :]:
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
    """For each model, the sizes of its running-sets beside the sizes of each schedule's noise-groups."""
    figure = Figure(figsize=(6.4 * len(models), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for model, panel in zip(models, figure.subplots(1, len(models), squeeze=False)[0], strict=True):
        sides = [("inference", model.inference), *((s.name, s.states) for s in model.schedules)]
        largest = max(states.ratios_SN.shape[1] for _, states in sides)
        width = 0.8 / len(sides)
        for number, (name, states) in enumerate(sides):
            shares = np.bincount(states.sizes_S, minlength=largest + 1)[1:] / len(states)
            places = np.arange(1, largest + 1) + (number - (len(sides) - 1) / 2) * width
            panel.bar(
                places, shares, width=width, label=name, color="black" if number == 0 else f"C{(number - 1) % 10}"
            )
        panel.set_title(f"{model.name}: blocks decoded together", fontsize="medium")
        panel.set_xticks(range(1, largest + 1))
        panel.set_xlabel("size of the running-set or noise-group")
        panel.set_ylabel("share of states")
        panel.legend(fontsize="x-small")
        panel.grid(alpha=0.3, axis="y")
    return figure


def write_alignment(models: Sequence[ComparedModel], folder: Path, *, settings: dict[str, Any]) -> str:
    """Write alignment.md, alignment.json, the plots and each model's fitted noise; returns the Markdown."""
    plots = draw_alignment(models, folder)
    for model in models:
        write_noise(folder / f"noise-{model.name}.json", model.fitted)
    settings = {
        **settings,
        "bins of total variation": NUM_BINS,
        "fewest states of a distance": LEAST_STATES,
    }
    text = render_alignment(models, plots=plots, settings=settings)
    write_text(folder / "alignment.md", text)
    write_json(
        folder / "alignment.json",
        {"models": [_model_fields(m) for m in models], "plots": list(plots), "settings": settings},
    )
    return text


def render_alignment(models: Sequence[ComparedModel], *, plots: Sequence[str], settings: dict[str, Any]) -> str:
    """The table of distances, the states of both sides, the plots, and the definitions."""
    lines = ["# Does training meet inference?", "", *_distance_table(models), "", *_vector_table(models), ""]
    lines += _state_table(models)
    lines += ["", *(f"![{Path(p).stem.replace('_', ' ')}]({p})" for p in plots), "", NOTES]
    lines += [f"- {name}: {value}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


NOTES = """A state is the mask ratios of the blocks that one forward decodes: the ACTIVE slots of a trace, the response
blocks of a noise-group in training. Blocks waiting to be stored are final and count as prefix; forwards that only
store are no states. In brackets are 95 % intervals, by a bootstrap over problems; the training states are drawn once.

- δ_R: total variation of the sizes. It is a lower bound of Eq. A.5's, which compares the running-sets themselves. TV
  and W1 of a slot are of its mask ratios, over all sizes; TV in bins, W1 of the values.
- W1 of vectors, under the l1 metric, lies between the sum of the slots' own W1 (lower) and the cost of an explicit
  coupling (upper). δ_t is the largest over the sizes with at least 30 states on both sides. Eq. A.5's is larger if
  rarer sizes are farther apart. The mean weighs each size as often as inference has it.
- `fitted` is fitted to the even-numbered problems; every distance is from the odd-numbered problems.
"""


def _distance_table(models: Sequence[ComparedModel]) -> list[str]:
    slots = max(len(s.distances.slots_w1) for m in models for s in m.schedules)
    heads = ["model", "training states", "δ_R", "mean W1", "δ_t (lower, upper)"]
    heads += [f"{metric} slot {n + 1}" for n in range(slots) for metric in ("TV", "W1")]
    rows = []
    for model in models:
        for schedule in model.schedules:
            d = schedule.distances
            delta_t = "-" if d.delta_t is None else f"{d.delta_t[0]:.3f}, {d.delta_t[1]:.3f}"
            of_slots = [distance for pair in zip(d.slots_tv, d.slots_w1, strict=True) for distance in pair]
            missing = [None] * (2 * slots - len(of_slots))
            cells = [_text(d.delta_r), _text(d.mean_w1), delta_t, *map(_text, [*of_slots, *missing])]
            rows.append([model.name, schedule.name, *cells])
    return table_lines(heads, rows)


def _vector_table(models: Sequence[ComparedModel]) -> list[str]:
    sizes = sorted({v.size for m in models for s in m.schedules for v in s.distances.by_size})
    heads = [f"W1 of {size} block{'s' * (size > 1)}: lower, upper (n)" for size in sizes]
    rows = []
    for model in models:
        for schedule in model.schedules:
            texts = {
                v.size: f"{_text(v.lower)}, {v.upper:.3f} ({v.num_inference})" for v in schedule.distances.by_size
            }
            left_out = f"{100 * schedule.distances.left_out:.1f} %"
            rows.append([model.name, schedule.name, *(texts.get(size, "-") for size in sizes), left_out])
    return table_lines(["model", "training states", *heads, "left out"], rows)


def _state_table(models: Sequence[ComparedModel]) -> list[str]:
    sides = [(m.name, "inference", m.inference) for m in models]
    sides += [(m.name, s.name, s.states) for m in models for s in m.schedules]
    largest = max(states.ratios_SN.shape[1] for _, _, states in sides)
    rows = []
    for name, side, states in sides:
        fields = _state_fields(states)
        slots = [f"{slot['mean']:.2f} ± {slot['std']:.2f}" for slot in fields["slots"]]
        slots += ["-"] * (largest - len(slots))
        rows.append([name, side, len(states), f"{fields['mean_size']:.2f}", *slots])
    heads = ["model", "states", "n", "mean size", *(f"slot {n + 1}: mean ± std" for n in range(largest))]
    return table_lines(heads, rows)


def _model_fields(model: ComparedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "inference": _state_fields(model.inference),
        "fitted_to_states": sum(count for _, count in model.fitted.states),
        "schedules": [
            {"name": s.name, "training": _state_fields(s.states), "distances": asdict(s.distances)}
            for s in model.schedules
        ],
    }


def _state_fields(states: States) -> dict[str, Any]:
    """Sizes and slots of one side. Histograms hold shares: of the sizes from 1, and of mask ratios in `NUM_BINS` bins
    over [0, 1]."""
    slots = []
    for values in states.ratios_SN.T:
        values = values[~np.isnan(values)]
        histogram = np.histogram(values, bins=NUM_BINS, range=(0.0, 1.0))[0] / len(values)
        slots.append(
            {
                "n": len(values),
                "mean": float(values.mean()),
                "std": float(values.std()),
                "histogram": histogram.tolist(),
            }
        )
    sizes = np.bincount(states.sizes_S, minlength=states.ratios_SN.shape[1] + 1)[1:] / len(states)
    return {
        "n": len(states),
        "problems": states.num_problems,
        "idle_forwards": states.num_idle,
        "mean_size": float(states.sizes_S.mean()),
        "sizes": sizes.tolist(),
        "slots": slots,
    }


def _text(distance: Interval | None) -> str:
    return "-" if distance is None else distance.text(".3f")
