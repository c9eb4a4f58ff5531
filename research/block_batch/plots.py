"""The plots of BlockBatch's analyses: forwards (Fig. 2), bifurcations, cache trajectories (Fig. 3)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from research.block_batch.bounds import Array
from research.block_batch.caches import CacheRecord, TrajectoryPoint
from research.block_batch.outputs import MeanRun, bifurcation_lengths, consensus

RUNS = {"single": "each block length alone", "block_batch": "BlockBatch's branches"}
MARKERS = {"initial": "*", "refresh": "D", "block": ".", "sync": "x"}
KINDS = {"initial": "first forward", "refresh": "full refresh", "block": "block forward", "sync": "copied by a sync"}


def draw_forwards(points: Mapping[str, MeanRun], path: Path, *, graded: bool) -> None:
    """One bar of mean NFE for each method and, if answers were graded, its accuracy on a second axis (Fig. 2)."""
    figure = Figure(figsize=(max(5.0, 1.0 * len(points) + 1.6), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    names = list(points)
    colors = ["C1" if n == "BlockBatch" else "C2" if "oracle" in n else "C0" for n in names]
    bars = panel.bar(names, [p.num_forwards for p in points.values()], color=colors, width=0.6)
    panel.bar_label(bars, fmt="%.1f", fontsize="small")
    panel.margins(y=0.25 if graded else 0.12)
    panel.set_ylabel("mean forwards (NFE)")
    if graded:
        side = panel.twinx()
        side.plot(names, [100 * p.accuracy for p in points.values()], "o", color="black", markersize=6)
        side.set_ylim(-5, 105)
        side.set_ylabel("accuracy in % (dots)")
    figure.savefig(path, format="png", dpi=130)


def draw_bifurcations(matrix: Array, lengths: Sequence[int], path: Path) -> None:
    """The mean common prefix of every pair of block lengths (Table 5) as a heat map; on the diagonal, mean outputs."""
    figure = Figure(figsize=(1.0 * len(lengths) + 2.4, 0.85 * len(lengths) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    image = panel.imshow(matrix, cmap="viridis", vmin=0, vmax=max(float(matrix.max()), 1.0))
    for (i, j), value in np.ndenumerate(matrix):
        shade = "black" if value > 0.6 * matrix.max() else "white"
        panel.text(j, i, f"{value:.1f}", ha="center", va="center", color=shade)
    panel.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    panel.set_yticks(range(len(lengths)), [str(n) for n in lengths])
    panel.set_xlabel("block length")
    panel.set_ylabel("block length")
    panel.set_title("tokens before two outputs differ\n(diagonal: mean output)", fontsize="medium")
    figure.colorbar(image, ax=panel, label="model tokens")
    figure.savefig(path, format="png", dpi=130)


def draw_consensus(outputs: Mapping[int, Sequence[int]], path: Path) -> None:
    """Write one sample's consensus heat map as PNG, a dashed line at the first bifurcation."""
    shares = consensus(outputs)
    split = min(bifurcation_lengths(outputs).values(), default=shares.shape[1])
    draw_shares(shares, sorted(outputs), path, split=split if split < shares.shape[1] else None)


def draw_shares(
    shares: Array, lengths: Sequence[int], path: Path, *, split: int | None = None, title: str = ""
) -> None:
    """Write consensus shares (S, P) as PNG, a row for each block length; grey after the end of an output."""
    figure = Figure(
        figsize=(min(16.0, max(6.0, shares.shape[1] / 14)), 0.5 * len(lengths) + 1.8), layout="constrained"
    )
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.set_facecolor("#cccccc")
    image = panel.imshow(shares, aspect="auto", cmap="RdYlGn", vmin=1 / len(lengths), vmax=1.0, interpolation="none")
    panel.set_yticks(range(len(lengths)), [str(n) for n in lengths])
    panel.set_ylabel("block length")
    panel.set_xlabel("position after the prompt")
    panel.set_title(title, fontsize="medium")
    if split is not None:
        panel.axvline(split - 0.5, color="black", linestyle="--", linewidth=1)
    figure.colorbar(image, ax=panel, label="share that agrees")
    figure.savefig(path, format="png", dpi=130)


def draw_trajectories(record: CacheRecord, lengths: Sequence[int], path: Path, *, title: str) -> None:
    """Fig. 3 of one prompt: caches in the tangent plane by step, along the anchor by step, and D_t with syncs."""
    figure = Figure(figsize=(12.0, 9.6), layout="constrained")
    FigureCanvasAgg(figure)
    colors = {n: f"C{i}" for i, n in enumerate(lengths)}
    for column, (run, label) in enumerate(RUNS.items()):
        panel: Any = figure.add_subplot(2, 2, column + 1, projection="3d")
        for n, path_points in _by_branch(record.points, run).items():
            _draw_space(panel, path_points, colors[n])
        panel.set_xlabel("x = ⟨r, e₁⟩")
        panel.set_ylabel("y = ⟨r, e₂⟩")
        panel.set_zlabel("forward")
        panel.set_title(f"{label}: tangent plane by step", fontsize="medium")
        panel.set_box_aspect((1, 1, 0.9), zoom=1.05)
        for axis in (panel.xaxis, panel.yaxis, panel.zaxis):
            axis.set_major_locator(MaxNLocator(4, integer=True))
            axis.set_tick_params(labelsize="small")
        panel.view_init(elev=22, azim=-58)
    _draw_axial(figure.add_subplot(2, 2, 3), record, colors)
    _draw_dispersion(figure.add_subplot(2, 2, 4), record)
    handles = [Line2D([], [], color=c, label=f"block length {n}") for n, c in colors.items()]
    handles += [
        Line2D([], [], color="#444", linestyle="none", marker=MARKERS[kind], label=text)
        for kind, text in KINDS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, format="png", dpi=110)


def _by_branch(points: Sequence[TrajectoryPoint], run: str) -> dict[int, list[TrajectoryPoint]]:
    branches: dict[int, list[TrajectoryPoint]] = {}
    for point in points:
        if point.run == run:
            branches.setdefault(point.branch, []).append(point)
    return branches


def _draw_space(panel: Any, points: Sequence[TrajectoryPoint], color: str) -> None:
    x, y, t = ([getattr(p, name) for p in points] for name in ("x", "y", "step"))
    panel.plot(x, y, t, color=color, linewidth=1.0, alpha=0.7)
    for kind, marker in MARKERS.items():
        of_kind = [p for p in points if p.kind == kind]
        if of_kind:
            panel.scatter(
                [p.x for p in of_kind],
                [p.y for p in of_kind],
                [p.step for p in of_kind],
                color=color,
                marker=marker,
                s={"block": 14, "initial": 90}.get(kind, 26),
                depthshade=False,
            )


def _draw_axial(panel: Axes, record: CacheRecord, colors: Mapping[int, str]) -> None:
    for n, points in _by_branch(record.points, "single").items():
        panel.plot([p.step for p in points], [p.z for p in points], color=colors[n], linewidth=1.0, alpha=0.7)
        for kind in ("block", "refresh"):
            of_kind = [p for p in points if p.kind == kind]
            panel.plot(
                [p.step for p in of_kind],
                [p.z for p in of_kind],
                MARKERS[kind],
                color=colors[n],
                markersize=4,
            )
    panel.set_title("each block length alone: displacement along the anchor", fontsize="medium")
    panel.set_xlabel("forward")
    panel.set_ylabel("z = ⟨K − c₀, u₀⟩")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)


def _draw_dispersion(panel: Axes, record: CacheRecord) -> None:
    steps, values = [step for step, _ in record.dispersions], [value for _, value in record.dispersions]
    panel.plot(steps, values, ".-", color="#444", linewidth=1.2, label="D_t")
    for number, sync in enumerate(record.syncs):
        pre, post = sync.contraction.pre, sync.contraction.post
        panel.annotate(
            "",
            xy=(sync.step - 0.5, post),
            xytext=(sync.step - 0.5, pre),
            arrowprops={"arrowstyle": "->", "color": "C3"},
        )
        panel.plot(
            [sync.step - 0.5],
            [pre],
            "o",
            color="C3",
            markersize=3,
            label="sync, D_pre → D_post" if number == 0 else None,
        )
    gammas = [g for s in record.syncs if (g := s.contraction.gamma) is not None]
    mean = f", mean Γ = {np.mean(gammas):.2f} over {len(gammas)} syncs" if gammas else ", no sync"
    panel.set_title(f"BlockBatch: dispersion of the branches{mean}", fontsize="medium")
    panel.set_xlabel("forward")
    panel.set_ylabel("mean squared distance of two branches")
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
