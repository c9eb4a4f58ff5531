"""The plot of accuracy over TPF: one panel for each task, one curve for each model and method, with error bars.

An endpoint that does not say its forwards is a line at its accuracy. The bars are 95 % Wilson intervals of the
accuracy and standard errors of the TPF.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mbd_core.evaluation.measures.summary import ReportRow
from mbd_core.evaluation.report.metrics import ACCURACY, TPF


def draw_plot(rows: Sequence[ReportRow], path: Path | BinaryIO, *, labels: Mapping[str, str]) -> None:
    """Write the plot as PNG; `labels` maps task names to panel titles, in panel order."""
    figure = Figure(figsize=(5.0 * len(labels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(labels), squeeze=False)[0]
    curves = list(dict.fromkeys((row.key.model, row.key.method) for row in rows))
    for panel, (task, label) in zip(panels, labels.items(), strict=True):
        for number, (model, method) in enumerate(curves):
            summaries = [r.summary for r in rows if (r.key.model, r.key.method, r.key.task) == (model, method, task)]
            points = [(s.tpf, s.tpf_stderr or 0.0, s) for s in summaries if s.tpf is not None]
            for s in summaries:
                if s.tpf is None:
                    panel.axhline(s.accuracy, color=f"C{number % 10}", linestyle=":", label=f"{model} (no TPF)")
            if not points:
                continue
            points.sort(key=lambda point: point[0])
            curve = [s for _, _, s in points]
            panel.errorbar(
                [tpf for tpf, _, _ in points],
                [s.accuracy for s in curve],
                xerr=[stderr for _, stderr, _ in points],
                yerr=[[s.accuracy - s.accuracy_low for s in curve], [s.accuracy_high - s.accuracy for s in curve]],
                marker="osD^vP*X"[number % 8],
                color=f"C{number % 10}",
                capsize=2,
                linewidth=1.2,
                label=f"{model}, {method}",
            )
        panel.set_title(f"{label} (n={next(r.summary.n for r in rows if r.key.task == task)})")
        panel.set_xlabel(TPF.axis)
        panel.set_ylabel(ACCURACY.axis)
        low, high = panel.get_ylim()
        panel.set_ylim(max(low, -2.0), min(max(high, 5.0), 102.0))
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=130)
