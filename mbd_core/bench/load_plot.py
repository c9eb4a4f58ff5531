"""Latency and throughput over the load, one curve for each target."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS = {
    "ttft_p50": ("TTFT, median (ms)", 1e3),
    "tpot_p50": ("TPOT, median (ms)", 1e3),
    "tokens_per_second": ("output tokens/s", 1.0),
}


def draw_load(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the plot as PNG. Points lie in the order of the loads, evenly apart; a kind of load has its own curve."""
    loads = list(dict.fromkeys(row["load"] for row in rows))
    figure = Figure(figsize=(4.6 * len(PANELS), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PANELS), squeeze=False)[0]
    curves = list(dict.fromkeys((row["target"], row["kind"]) for row in rows))
    targets = list(dict.fromkeys(target for target, _ in curves))
    for panel, (key, (label, scale)) in zip(panels, PANELS.items(), strict=True):
        for target, kind in curves:
            number = targets.index(target)
            points = [
                (loads.index(row["load"]), row[key] * scale)
                for row in rows
                if (row["target"], row["kind"]) == (target, kind) and row[key] is not None
            ]
            panel.plot(
                [x for x, _ in points],
                [y for _, y in points],
                marker="osD^vP*X"[number % 8],
                color=f"C{number % 10}",
                label=target if kind == curves[0][1] else None,
            )
        panel.set_xticks(range(len(loads)), loads, rotation=30, ha="right")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=130)
