"""A report on step traces: the measures as JSON and Markdown, and the plots."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mbd_core.files import write_json, write_text
from mbd_core.trace.measures import RunMeasures, Spread, measure
from mbd_core.trace.plots import draw_plots
from mbd_core.trace.traced_run import TracedRun


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
    header = ["| | " + " | ".join(_escape(m.name) for m in measures) + " |", "|---|" + "---|" * len(measures)]
    lines = ["# Step traces", "", *header]
    for label, cells in _rows(measures):
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    lines += ["", "## Mask ratio a forward sees, by rank among the active slots (Fig. 2 C)", "", *header]
    for rank in range(max(len(m.mask_ratios) for m in measures)):
        cells = [_mean(m.mask_ratios[rank]) if rank < len(m.mask_ratios) else "-" for m in measures]
        lines.append(f"| active slot {rank + 1} | " + " | ".join(cells) + " |")
    for rank in range(max(len(m.mask_ratio_gaps) for m in measures)):
        cells = [_mean(m.mask_ratio_gaps[rank]) if rank < len(m.mask_ratio_gaps) else "-" for m in measures]
        lines.append(f"| gap from slot {rank + 1} to {rank + 2} | " + " | ".join(cells) + " |")
    lines += ["", *(f"![{Path(p).stem.replace('_', ' ')}]({p})" for p in plots), "", NOTES]
    lines += [f"- {name}: {value}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


NOTES = """Values are mean ± standard deviation over forwards or blocks. Accepted tokens count every position that
became a token, also after an EOS. η = TPF / Q with Q = N_buf · B tokens a forward (paper Section 4.5); for "resident
only", Q counts the resident blocks alone. A store-only forward decodes nothing: the bubble. A lifetime counts a
block's forwards from its activation to the one that stored it; blocks that were never stored (dropped after an EOS, or
still in the buffer when the trace ended) have none.
"""


def _rows(measures: Sequence[RunMeasures]) -> list[tuple[str, list[str]]]:
    def cells(value: Callable[[RunMeasures], str]) -> list[str]:
        return [value(m) for m in measures]

    return [
        ("requests", cells(lambda m: f"{m.num_requests}")),
        ("full-attention requests, left out", cells(lambda m: f"{m.num_other}")),
        ("slots N_buf", cells(lambda m: f"{m.num_slots}")),
        ("block size B", cells(lambda m: "unknown" if m.block_size is None else f"{m.block_size}")),
        ("forwards (NFE)", cells(lambda m: f"{m.num_forwards}")),
        ("accepted tokens", cells(lambda m: f"{m.num_accepted}")),
        ("edited tokens", cells(lambda m: f"{m.num_edited}")),
        ("accepted tokens per forward", cells(lambda m: f"{m.tpf:.3f}")),
        ("token efficiency η", cells(lambda m: _share(m.token_efficiency))),
        ("token efficiency, resident only", cells(lambda m: _share(m.resident_efficiency))),
        ("store-only forwards", cells(lambda m: f"{m.num_store_only} ({100 * m.store_only_share:.1f} %)")),
        ("active blocks a forward", cells(lambda m: _mean(m.active_blocks))),
        ("block lifetime (forwards)", cells(lambda m: _mean(m.lifetimes))),
        ("of it final, waiting or stored", cells(lambda m: _mean(m.waiting))),
        ("blocks that never left", cells(lambda m: f"{m.num_unfinished}")),
    ]


def _share(value: float | None) -> str:
    return "needs the block size" if value is None else f"{value:.4f}"


def _mean(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.mean:.2f} ± {spread.std:.2f}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
