"""The plot of a study: accuracy over tokens per forward, a panel a buffer size, a curve a recipe, with intervals."""

from collections.abc import Mapping, Sequence
from typing import BinaryIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mbd_core.studies.ledger.paired_bootstrap import Bootstrap, Interval, curves
from mbd_core.studies.ledger.study_rows import PairedRows


def draw_study(rows: PairedRows, bootstrap: Bootstrap, file: BinaryIO, *, names: Mapping[str, str]) -> None:
    """Write the plot as PNG; bars are 95 % intervals over problems and seeds."""
    known = curves(rows)
    sizes = sorted({size for _, size in known})
    figure = Figure(figsize=(5.0 * len(sizes), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    recipes = list(dict.fromkeys(recipe for recipe, _ in known))
    for panel, size in zip(panels, sizes, strict=True):
        for number, recipe in enumerate(recipes):
            points = sorted(
                (
                    (Interval.of(bootstrap.mean(cell, "tpf")), Interval.of(bootstrap.mean(cell, "accuracy")))
                    for cell in known.get((recipe, size), [])
                ),
                key=lambda point: point[0].value,
            )
            if not points:
                continue
            across, up = ([point[axis] for point in points] for axis in (0, 1))
            panel.errorbar(
                [x.value for x in across],
                [y.value for y in up],
                xerr=_bars(across),
                yerr=_bars(up),
                marker="osD^vP*Xh"[number % 9],
                color=f"C{number % 10}",
                capsize=2,
                linewidth=1.2,
                label=names.get(recipe, recipe),
            )
        panel.set_title("SingleBD" if size == 1 else f"MultiBD, {size} slots")
        panel.set_xlabel("tokens per forward (TPF)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy (%)")
    figure.legend(*panels[-1].get_legend_handles_labels(), fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(file, format="png", dpi=130)


def _bars(values: Sequence[Interval]) -> list[list[float]]:
    """How far the intervals reach below and above the values, which few draws may leave outside them."""
    return [[max(0.0, v.value - v.low) for v in values], [max(0.0, v.high - v.value) for v in values]]
