"""A load's records as rows of a table, percentiles, throughput, goodput, errors; and their plot over the load."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.load.endpoints import ENGINE_ALONE
from benchmarks.load.loads import Load, LoadRun, RequestRecord
from benchmarks.measuring import markdown
from mbd_core.evaluation.measures.statistics import percentile

PERCENTILES = (50, 90, 99)
ROW_COLUMNS = {
    "target": "target",
    "load": "load",
    "num_ended": "ended",
    "num_errors": "errors",
    "requests_per_second": "requests/s|.2f",
    "tokens_per_second": "tokens/s|.1f",
    "tokens_per_arrival": "tokens/event|.2f",
    "ttft_p50": "TTFT p50 (ms)|.1f",
    "ttft_p90": "p90 (ms)|.1f",
    "ttft_p99": "p99 (ms)|.1f",
    "tpot_p50": "TPOT p50 (ms)|.2f",
    "tpot_p90": "p90 (ms)|.2f",
    "tpot_p99": "p99 (ms)|.2f",
    "itl_mean": "ITL mean (ms)|.2f",
    "itl_p99": "ITL p99 (ms)|.1f",
    "gap_p50": "event gap p50 (ms)|.1f",
    "gap_p99": "p99 (ms)|.1f",
    "e2e_p50": "end-to-end p50 (ms)|.0f",
    "e2e_p99": "p99 (ms)|.0f",
    "goodput": "goodput/s|.2f",
}
RATIO_COLUMNS = {
    "target": "target",
    "over": "over",
    "load": "load",
    "throughput": "tokens/s ratio|.3f",
    "throughput_range": "of its rounds",
    "first_token": "TTFT p50 ratio|.3f",
    "first_token_range": "of its rounds",
    "rounds": "rounds",
}
SLO_FIELDS = {"ttft": "first_token_seconds", "tpot": "token_seconds", "e2e": "seconds"}


@dataclass(frozen=True)
class LatencyObjective:
    """A service-level objective: a request is good if none of these latencies is above its limit, in seconds."""

    limits: Mapping[str, float]

    def is_met(self, record: RequestRecord) -> bool:
        """Whether the request ended as promised and in time. A limit on a latency that the request lacks is met."""
        latencies = {name: getattr(record, SLO_FIELDS[name]) for name in self.limits}
        return record.error is None and all(v is None or v <= self.limits[name] for name, v in latencies.items())


def parse_objective(text: str) -> LatencyObjective:
    """Reads `ttft=500,tpot=50,e2e=3000`, in milliseconds. Raises `ValueError` for a bad text."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in SLO_FIELDS:
            raise ValueError(f"--slo: '{name}' is unknown; known: {', '.join(SLO_FIELDS)}")
        try:
            limits[name] = float(value) / 1e3
        except ValueError:
            limits[name] = math.nan
        if not 0 < limits[name] < math.inf:
            raise ValueError(f"--slo {part}: '{value}' must be a number of milliseconds above 0")
    if not limits:
        raise ValueError(f"--slo names no limit; give some of {', '.join(f'{n}=MS' for n in SLO_FIELDS)}")
    return LatencyObjective(limits)


def load_row(
    target: str, load: Load, runs: Sequence[LoadRun], objective: LatencyObjective | None = None
) -> dict[str, Any]:
    """One row: latencies of all runs together, and rates as medians of the runs. `counts` has the sample sizes."""
    records = [record for run in runs for record in run.records]
    answers = [record for record in records if record.error is None]
    latencies = {
        "ttft": _numbers_in(record.first_token_seconds for record in answers),
        "tpot": _numbers_in(record.token_seconds for record in answers),
        "itl": [latency for record in answers for latency in record.inter_token_seconds],
        "gap": [gap for record in answers for gap in record.gaps],
        "e2e": [record.seconds for record in answers],
    }
    num_arrivals = sum(len(record.arrivals) for record in answers)
    row: dict[str, Any] = {
        "target": target,
        "load": str(load),
        "kind": type(load).__name__,
        "rounds": len(runs),
        "num_ended": len(answers),
        "num_errors": len(records) - len(answers),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "requests_per_second": statistics.median(_rate(run) for run in runs),
        "tokens_per_second": statistics.median(token_rate(run) for run in runs),
        "tokens_per_second_by_round": [token_rate(run) for run in runs],
        "tokens_per_arrival": sum(r.num_tokens for r in answers) / num_arrivals if num_arrivals else None,
        "itl_mean": statistics.fmean(latencies["itl"]) if latencies["itl"] else None,
        "counts": {name: len(values) for name, values in latencies.items()},
    }
    for name, values in latencies.items():
        row |= {f"{name}_p{percent}": percentile(values, percent) for percent in PERCENTILES}
    if objective is not None:
        row["goodput"] = statistics.median(
            sum(objective.is_met(record) for record in run.records) / run.seconds for run in runs
        )
    return row


def ratio_row(
    target: str, base_name: str, load: Load, runs: Sequence[LoadRun], bases: Sequence[LoadRun]
) -> dict[str, Any]:
    """One target over another: the median and the range of the rounds' ratios. In a round the targets took turns.

    A round has no ratio if one of the two targets had no request that ended as promised.
    """
    pairs = list(zip(runs, bases, strict=True))
    throughput = [token_rate(run) / token_rate(base) for run, base in pairs if token_rate(run) and token_rate(base)]
    firsts = [
        first / of_base
        for run, base in pairs
        if (first := _first_token(run)) is not None and (of_base := _first_token(base)) is not None
    ]
    return {
        "target": target,
        "over": base_name,
        "load": str(load),
        "rounds": len(runs),
        "throughput": statistics.median(throughput) if throughput else None,
        "throughput_range": _range(throughput) if throughput else None,
        "first_token": statistics.median(firsts) if firsts else None,
        "first_token_range": _range(firsts) if firsts else None,
    }


def token_rate(run: LoadRun) -> float:
    """Output tokens a second of the requests that ended as promised."""
    return sum(record.num_tokens for record in run.records if record.error is None) / run.seconds


def _rate(run: LoadRun) -> float:
    return sum(record.error is None for record in run.records) / run.seconds


def _first_token(run: LoadRun) -> float | None:
    return percentile(_numbers_in(r.first_token_seconds for r in run.records if r.error is None), 50)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def _numbers_in(values: Any) -> list[float]:
    return [value for value in values if value is not None]


def build_report(
    runs: Mapping[str, Sequence[Sequence[LoadRun]]], loads: Sequence[Load], objective: LatencyObjective | None
) -> dict[str, Any]:
    """Rows load by load, and the ratios of the later targets to the first. Targets with more replicas also have a
    ratio to the target with fewest."""
    names = list(runs)
    pairs = [(name, names[0]) for name in names[1:]]
    if names[0] == ENGINE_ALONE:
        pairs += [(name, names[1]) for name in names[2:]]
    return {
        "rows": [load_row(n, load, runs[n][i], objective) for i, load in enumerate(loads) for n in names],
        "ratios": [
            ratio_row(name, base_name, load, runs[name][i], runs[base_name][i])
            for name, base_name in pairs
            for i, load in enumerate(loads)
        ],
        "slo": None if objective is None else {name: limit * 1e3 for name, limit in objective.limits.items()},
    }


def print_report(report: dict[str, Any]) -> None:
    """Print the rows, the sizes of their samples, the ratios, and the kinds of failures."""
    rows = report["rows"]
    goodput = report["slo"] is not None
    settings = report["settings"]
    load_before, load_after = settings["load_average"].values()
    print(
        f"{settings['machine']}; the machine's load average was {load_before:.1f} before and {load_after:.1f} after\n"
    )
    print(markdown(rows, {key: text for key, text in ROW_COLUMNS.items() if goodput or key != "goodput"}))
    print(f"\nsizes of the samples (requests, or gaps between events), from which p{PERCENTILES[-1]} needs 100:\n")
    sizes = [{"target": row["target"], "load": row["load"], **row["counts"]} for row in rows]
    print(markdown(sizes, {k: k for k in ("target", "load", "ttft", "tpot", "itl", "gap", "e2e")}))
    if report["ratios"]:
        print("\n" + markdown(report["ratios"], RATIO_COLUMNS))
    for row in rows:
        for kind, count in row["errors"].items():
            print(f"\n{row['target']}, {row['load']}: {count} x {kind}")


PANELS = {
    "ttft_p50": ("TTFT, median (ms)", 1e3),
    "tpot_p50": ("TPOT, median (ms)", 1e3),
    "tokens_per_second": ("output tokens/s", 1.0),
}


def draw_load(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the plot as PNG. Points lie in the order of the loads, evenly apart; each kind of load has its own
    curve."""
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
