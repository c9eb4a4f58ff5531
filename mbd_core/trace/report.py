"""A report on step traces: the measures as JSON and Markdown, and the plots of Figure 2.

The plots show active blocks (Fig. 2 D-E), mask ratios (2 C), block maps, lifetimes and efficiency.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mbd_core.files import write_json, write_text
from mbd_core.tables import Table, markdown
from mbd_core.trace.measures import RunMeasures, Spread, active_by_forward, measure, ratios_by_rank
from mbd_core.trace.traced_run import DUMMY, TO_CACHE, RequestTrace, TracedRun

NUM_TRAJECTORIES = 5
# Colors of a block: not yet in the buffer; ACTIVE, by its mask ratio; TO_CACHE; in the cache.
MAP_COLORS = ("#f2f2f2", "#cfe3f7", "#8fc1ea", "#3f87c9", "#e08a1e", "#b9cdb5")
MAP_LABELS = ("not begun", "active, mostly masked", "active, half masked", "active, mostly filled", "stored", "cached")


def draw_plots(runs: Sequence[TracedRun], measures: Sequence[RunMeasures], folder: Path) -> list[str]:
    """Write all PNG files into `folder`; returns their names."""
    figures = {
        "active_blocks.png": _active_blocks(runs),
        "mask_ratios.png": _mask_ratios(runs),
        "block_map.png": _block_map(runs),
        "lifetimes.png": _lifetimes(measures),
        "efficiency.png": _efficiency(measures),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, format="png", dpi=130)
    return list(figures)


def sampled(run: TracedRun) -> list[RequestTrace]:
    """A few requests, evenly spaced over the run."""
    count = min(NUM_TRAJECTORIES, len(run.requests))
    return [run.requests[i] for i in np.linspace(0, len(run.requests) - 1, count).round().astype(int)]


def _figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _active_blocks(runs: Sequence[TracedRun]) -> Figure:
    """Fig. 2 D on the left, E on the right; one row of panels for each run."""
    figure, panels = _figure(len(runs), 2, width=5.4, height=2.9)
    for run, (mean_panel, path_panel) in zip(runs, panels, strict=True):
        mean, std, _ = active_by_forward(run)
        at = np.arange(1, len(mean) + 1)
        mean_panel.plot(at, mean, color="C0", label="mean")
        mean_panel.fill_between(at, mean - std, mean + std, color="C0", alpha=0.2, label="± one std", linewidth=0)
        mean_panel.legend(fontsize="small")
        mean_panel.set_title(f"{run.name}: active blocks (n={len(run.requests)})", fontsize="medium")
        for number, request in enumerate(sampled(run)):
            forwards = np.arange(1, request.num_forwards + 1)
            path_panel.step(forwards, request.num_active_T + 0.04 * number, where="mid", linewidth=1.2)
        path_panel.set_title(f"{run.name}: sampled trajectories", fontsize="medium")
        for panel in (mean_panel, path_panel):
            panel.set_ylim(-0.2, run.num_slots + 0.4)
            panel.set_yticks(range(run.num_slots + 1))
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.set_xlabel("forward of the request")
            panel.set_ylabel("active blocks")
            panel.grid(alpha=0.3)
    return figure


def _mask_ratios(runs: Sequence[TracedRun]) -> Figure:
    """Fig. 2 C: one outline for each rank among the active slots."""
    figure, panels = _figure(1, len(runs), width=5.0, height=3.6)
    for run, panel in zip(runs, panels[0], strict=True):
        for rank, values in enumerate(ratios_by_rank(run), start=1):
            shares, edges = np.histogram(values, bins=10, range=(0.0, 1.0))
            label = f"active slot {rank} (mean {values.mean():.2f})"
            panel.stairs(shares / len(values), edges, color=f"C{rank - 1}", fill=True, alpha=0.25)
            panel.stairs(shares / len(values), edges, color=f"C{rank - 1}", linewidth=1.6, label=label)
        panel.set_title(f"{run.name}: mask ratio a forward sees", fontsize="medium")
        panel.set_xlabel("mask ratio")
        panel.set_ylabel("share of forwards")
        panel.legend(fontsize="small")
        panel.grid(alpha=0.3)
    return figure


def _block_map(runs: Sequence[TracedRun]) -> Figure:
    """The state of every block at every forward, for the first sampled request of each run."""
    figure, panels = _figure(len(runs), 1, width=8.0, height=2.6)
    longest = max(sampled(run)[0].num_forwards for run in runs)
    for run, panel in zip(runs, panels[:, 0], strict=True):
        _draw_map(panel, sampled(run)[0], longest)
        panel.set_title(f"{run.name}: request {sampled(run)[0].request_id}", fontsize="medium")
    handles = [Patch(facecolor=c, edgecolor="#888", label=t) for c, t in zip(MAP_COLORS, MAP_LABELS, strict=True)]
    handles.append(Patch(facecolor="none", edgecolor="#c0392b", hatch="///", label="store-only forward (bubble)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _draw_map(panel: Axes, request: RequestTrace, longest: int) -> None:
    first = int(request.block_TN[0, 0])
    resident = request.state_TN != DUMMY
    last = int(request.block_TN[resident].max())
    cells = np.zeros((last - first + 1, request.num_forwards))
    for t in range(request.num_forwards):
        cells[: request.block_TN[t, 0] - first, t] = 5
        for n in np.flatnonzero(resident[t]):
            filled = 1 + min(2, int(3 * (1 - request.mask_ratio_TN[t, n])))
            cells[request.block_TN[t, n] - first, t] = 4 if request.state_TN[t, n] == TO_CACHE else filled
    panel.imshow(
        cells,
        cmap=ListedColormap(MAP_COLORS),
        vmin=0,
        vmax=len(MAP_COLORS) - 1,
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, request.num_forwards + 0.5, last + 0.5, first - 0.5),
    )
    for t in np.flatnonzero(request.store_only_T).tolist():
        panel.axvspan(t + 0.5, t + 1.5, facecolor="none", edgecolor="#c0392b", hatch="///", linewidth=0)
    panel.set_xlim(0.5, longest + 0.5)
    panel.set_yticks(range(first, last + 1))
    panel.set_xlabel("forward of the request")
    panel.set_ylabel("block")


def _lifetimes(measures: Sequence[RunMeasures]) -> Figure:
    figure, panels = _figure(1, len(measures), width=4.6, height=3.4)
    for m, panel in zip(measures, panels[0], strict=True):
        panel.set_title(f"{m.name}: block lifetimes", fontsize="medium")
        panel.set_xlabel("forwards from activation to leaving")
        panel.set_ylabel("share of blocks")
        if m.lifetimes is None:
            panel.text(0.5, 0.5, "no block left the buffer", ha="center", transform=panel.transAxes)
            continue
        shares = m.lifetimes.histogram
        panel.bar(range(1, len(shares) + 1), shares, color="C0")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.axvline(m.lifetimes.mean, color="C1", label=f"mean {m.lifetimes.mean:.2f}")
        panel.legend(fontsize="small")
        panel.grid(alpha=0.3, axis="y")
    return figure


def _efficiency(measures: Sequence[RunMeasures]) -> Figure:
    figure, panels = _figure(1, 3, width=3.4, height=3.2)
    names = [m.name for m in measures]
    for panel, title, values in (
        (panels[0][0], "tokens per forward", [m.tpf for m in measures]),
        (panels[0][1], "token efficiency η = TPF / Q", [m.token_efficiency for m in measures]),
        (panels[0][2], "store-only forwards (share)", [m.store_only_share for m in measures]),
    ):
        panel.set_title(title, fontsize="medium")
        if any(v is None for v in values):
            panel.text(0.5, 0.5, "needs the block size", ha="center", transform=panel.transAxes)
            continue
        bars = panel.bar(names, values, color=[f"C{i % 10}" for i in range(len(names))], width=0.6)
        panel.bar_label(bars, fmt="%.3g")
        panel.margins(y=0.15)
        panel.tick_params(axis="x", labelrotation=20)
    return figure


def write_trace_report(runs: Sequence[TracedRun], folder: Path, *, settings: dict[str, Any]) -> str:
    """Write the PNG files, report.md and report.json into `folder`; returns the Markdown."""
    measures = [measure(run) for run in runs]
    plots = draw_plots(runs, measures, folder)
    text = render_markdown(measures, plots=plots, settings=settings)
    write_text(folder / "report.md", text)
    write_json(folder / "report.json", {"runs": [asdict(m) for m in measures], "plots": plots, "settings": settings})
    return text


def render_markdown(measures: Sequence[RunMeasures], *, plots: Sequence[str], settings: dict[str, Any]) -> str:
    """A table with one column for each run, the mask ratios by slot, the plots, and the definitions."""
    columns = ["", *(m.name for m in measures)]
    ratios = [
        (label.format(rank + 1, rank + 2), *(_mean(of[rank]) if rank < len(of) else None for of in by_run))
        for label, by_run in (
            ("active slot {}", [m.mask_ratios for m in measures]),
            ("gap from slot {} to {}", [m.mask_ratio_gaps for m in measures]),
        )
        for rank in range(max(map(len, by_run)))
    ]
    tables = [
        Table(
            title="Step traces", level=1, columns=columns, rows=[(label, *cells) for label, cells in _rows(measures)]
        ),
        Table(
            title="Mask ratio a forward sees, by rank among the active slots (Fig. 2 C)",
            columns=columns,
            rows=ratios,
            notes=(
                "\n".join(f"![{Path(p).stem.replace('_', ' ')}]({p})" for p in plots),
                NOTES,
                [f"{name}: {value}" for name, value in settings.items()],
            ),
        ),
    ]
    return markdown(tables)


NOTES = """Values are mean ± standard deviation over forwards or blocks. Accepted tokens count every position that
became a token, also after an EOS. η = TPF / Q with Q = N_buf · B tokens a forward (paper Section 4.5); for "resident
only", Q counts the resident blocks alone. A store-only forward decodes nothing: the bubble. A lifetime counts a
block's forwards from its activation to the forward that stored it. Blocks that were never stored (dropped after an
EOS, or still in the buffer when the trace ended) have no lifetime. A drafted token is judged if a verification
compares it with the model at block size 1, or with the larger model. At the first refusal the verification puts a
token of its own, and drops the later drafted tokens.
"""


def _rows(measures: Sequence[RunMeasures]) -> list[tuple[str, list[str]]]:
    def cells(value: Callable[[RunMeasures], str]) -> list[str]:
        return [value(m) for m in measures]

    return [
        ("requests", cells(lambda m: f"{m.num_requests}")),
        ("requests without a Block Buffer, left out", cells(lambda m: f"{m.num_other}")),
        ("slots N_buf", cells(lambda m: f"{m.num_slots}")),
        ("block size B", cells(lambda m: "unknown" if m.block_size is None else f"{m.block_size}")),
        ("forwards (NFE)", cells(lambda m: f"{m.num_forwards}")),
        ("accepted tokens", cells(lambda m: f"{m.num_accepted}")),
        ("edited tokens", cells(lambda m: f"{m.num_edited}")),
        ("drafted tokens that were judged", cells(lambda m: f"{m.num_judged}" if m.num_judged else "-")),
        ("of them confirmed", cells(_confirmed)),
        ("of them refused, or after one", cells(_refused)),
        ("confirmed tokens a judged block", cells(_acceptance_length)),
        ("accepted tokens per forward", cells(lambda m: f"{m.tpf:.3f}")),
        ("token efficiency η", cells(lambda m: _share(m.token_efficiency))),
        ("token efficiency, resident only", cells(lambda m: _share(m.resident_efficiency))),
        ("store-only forwards", cells(lambda m: f"{m.num_store_only} ({100 * m.store_only_share:.1f} %)")),
        ("active blocks a forward", cells(lambda m: _mean(m.active_blocks))),
        ("block lifetime (forwards)", cells(lambda m: _mean(m.lifetimes))),
        ("of it final, waiting or stored", cells(lambda m: _mean(m.waiting))),
        ("blocks that never left", cells(lambda m: f"{m.num_unfinished}")),
    ]


def _confirmed(m: RunMeasures) -> str:
    return f"{m.num_confirmed} ({100 * m.num_confirmed / m.num_judged:.1f} %)" if m.num_judged else "-"


def _refused(m: RunMeasures) -> str:
    return f"{m.num_judged - m.num_confirmed}" if m.num_judged else "-"


def _acceptance_length(m: RunMeasures) -> str:
    return f"{m.num_confirmed / m.num_verifications:.2f}" if m.num_verifications else "-"


def _share(value: float | None) -> str:
    return "needs the block size" if value is None else f"{value:.4f}"


def _mean(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.mean:.2f} ± {spread.std:.2f}"
