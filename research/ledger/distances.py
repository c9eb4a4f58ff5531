"""How far the training states of each recipe of a study are from traces of inference, and whether the near do better.

The traces are of the base under MultiBD, before any row is trained: half of the problems fit the noise of the ninth
row, and all distances are of the other half.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.evaluation.report.sections import table_line
from mbd_core.files import file_beside
from mbd_core.multitf.recipes.shipped import LEDGER_MBD
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.noise import FittedNoise, fit_noise
from research.alignment.distances import compare
from research.alignment.states import ModelTraces, decoded_examples, inference_states, training_states
from research.ledger.claims import CLAIM_TAU
from research.ledger.plan import FITTED
from research.ledger.rows import Cell, PairedRows
from research.ledger.statistics import FEWEST, Bootstrap, RankCorrelation, curves, rank_correlation

COLUMNS = pa.schema(
    [pa.field("recipe", pa.string())]
    + [pa.field(f"{name}{part}", pa.float64()) for name in ("delta_r", "mean_w1") for part in ("", "_low", "_high")]
)
BOOTSTRAP_SAMPLES = 500
MOST_SIZES = "mean_w1 where delta_r < 0.5"
"""Decided after the results: a mean over the sizes that a row shares with inference is of few states where it shares
few, as teacher forcing's, whose groups are single blocks."""


@dataclass(frozen=True, kw_only=True)
class RowDistance:
    """A recipe's states against inference's: total variation of the running-sets' sizes, and the mean Wasserstein-1
    of mask ratios over the sizes that both sides have (`None` where they share none), each with its interval."""

    recipe: str
    delta_r: tuple[float, float, float]
    mean_w1: tuple[float, float, float] | None


def measure_rows(
    traces: ModelTraces, states: Mapping[str, StateConfig], *, draws: int, seed: int
) -> tuple[list[RowDistance], FittedNoise]:
    """The distances of every recipe's states, and of `FITTED`, which is `LEDGER_MBD` with the noise that is returned
    as well."""
    requests = sorted(traces.run.requests, key=lambda request: int(request.request_id))
    even, odd = ([r for r in requests if int(r.request_id) % 2 == half] for half in (0, 1))
    if not even or not odd:
        raise ValueError(f"{len(requests)} traced problems are no two halves; trace at least 2")
    fitting, inference = inference_states(even), inference_states(odd)
    noise = fit_noise(fitting.rows(), source=f"{traces.name}, {len(fitting)} forwards of {len(even)} problems")
    method = states[LEDGER_MBD.name]
    fitted = replace(method, schedule="fitted", bounds=replace(method.bounds, fitted=noise))
    examples = decoded_examples(replace(traces.run, requests=tuple(odd)), traces.prompt_lengths)
    found = []
    for recipe, config in {**states, FITTED: fitted}.items():
        drawn = training_states(examples, config, draws=draws, seed=seed)
        d = compare(inference, drawn, num_bootstrap=BOOTSTRAP_SAMPLES, seed=seed)
        w1 = None if d.mean_w1 is None else (d.mean_w1.value, d.mean_w1.low, d.mean_w1.high)
        sizes = (d.delta_r.value, d.delta_r.low, d.delta_r.high)
        found.append(RowDistance(recipe=recipe, delta_r=sizes, mean_w1=w1))
    return found, noise


def write_distances(path: Path, distances: Sequence[RowDistance]) -> None:
    rows = []
    for one in distances:
        row: dict[str, str | float | None] = {"recipe": one.recipe}
        for name, numbers in (("delta_r", one.delta_r), ("mean_w1", one.mean_w1 or (None, None, None))):
            row |= {f"{name}{part}": value for part, value in zip(("", "_low", "_high"), numbers, strict=True)}
        rows.append(row)
    with file_beside(path) as beside:
        pq.write_table(pa.Table.from_pylist(rows, schema=COLUMNS), beside)


def read_distances(path: Path) -> list[RowDistance]:
    """What `write_distances` wrote; `ValueError` for any other file."""
    try:
        rows = pq.read_table(path, schema=COLUMNS).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read as distances: {str(error).splitlines()[0]}") from None
    found = []
    for row in rows:
        sizes, w1 = (tuple(row[f"{name}{part}"] for part in ("", "_low", "_high")) for name in ("delta_r", "mean_w1"))
        found.append(RowDistance(recipe=row["recipe"], delta_r=sizes, mean_w1=None if w1[0] is None else w1))
    return found


def correlations(
    distances: Sequence[RowDistance], rows: PairedRows, bootstrap: Bootstrap
) -> dict[str, RankCorrelation]:
    """Of each distance with each outcome, by what they are; rows without the distance, or without answers, are left
    out. The outcomes are of MultiBD with each buffer size."""
    known = curves(rows)
    values_of = {
        "delta_r": {d.recipe: d.delta_r[0] for d in distances},
        "mean_w1": {d.recipe: d.mean_w1[0] for d in distances if d.mean_w1},
        MOST_SIZES: {d.recipe: d.mean_w1[0] for d in distances if d.mean_w1 and d.delta_r[0] < 0.5},
    }
    found = {}
    for size in sorted({cell.buffer_size for cell in rows.cells} - {1}):
        for name, by_recipe in values_of.items():
            there = [recipe for recipe in by_recipe if (recipe, size) in known]
            if name == MOST_SIZES and len(there) < FEWEST:  # so few rows of another base may share their sizes
                continue
            values = [by_recipe[recipe] for recipe in there]
            cells = [Cell(recipe, size, CLAIM_TAU) for recipe in there]
            outcomes = {
                "accuracy": [bootstrap.mean(cell, "accuracy") for cell in cells],
                "NFE": [bootstrap.mean(cell, "nfe") for cell in cells],
                "AUP": [bootstrap.aup(known[recipe, size]) for recipe in there],
            }
            for outcome, drawn in outcomes.items():
                found[f"{name}, {outcome}, {size} slots"] = rank_correlation(values, np.stack(drawn))
    return found


def distance_lines(
    distances: Sequence[RowDistance], found: Mapping[str, RankCorrelation], *, names: Mapping[str, str]
) -> list[str]:
    """The section of the report: the distances, and their rank correlations with the outcomes."""
    lines = ["## Distances from inference", "", "| Recipe | δ_R [95 %] | mean W1 [95 %] |", "|---|---:|---:|"]
    for one in distances:
        cells = ["-" if d is None else f"{d[0]:.3f} [{d[1]:.3f}, {d[2]:.3f}]" for d in (one.delta_r, one.mean_w1)]
        lines.append(table_line([names.get(one.recipe, one.recipe), *cells]))
    lines += [
        "",
        "A negative correlation with accuracy or AUP says that nearer rows do better; with NFE, a positive one.",
        "δ_R and W1 are lower bounds. W1 is the sum over a running-set's slots, its mean over the sizes that a row "
        "shares with inference. Their intervals are over the traced problems alone; no p-value is corrected. "
        f"`{MOST_SIZES}` leaves out rows that share less than half; it was decided after the results were seen.",
    ]
    lines += ["", "| Distance, outcome | Rows | Spearman's rho [95 %] | p, all orders |", "|---|---:|---:|---:|"]
    for what, one_found in found.items():
        lines.append(table_line([what, one_found.n, one_found.rho.text("+.2f"), f"{one_found.p_value:.3f}"]))
    return [*lines, ""]
