"""Distances of each recipe's training states from traces of inference, and whether near recipes do better.

The traces are of the base under MultiBD, before any recipe is trained. The noise of the recipe `FITTED` is fitted to
half of the problems, and all distances are measured on the other half. Whether near recipes do better is answered by
Spearman's rank correlation over the recipes, with an exact permutation test and an interval of its measurement.

Shape legend: R rows; D draws, the first of which is the measurement.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.checkpoint.folder import read_folder
from mbd_core.evaluation.measures.statistics import Interval, p_text
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.files import file_beside, folder_beside
from mbd_core.json_text import parse_json
from mbd_core.multitf.recipes.shipped import ABLATION_ROWS, LEDGER_MBD, LEDGER_TASK
from mbd_core.multitf.states.fitted_noise import FittedNoise, write_noise
from mbd_core.multitf.states.layout import StateConfig
from research.alignment.distances import compare
from research.alignment.states import RECORD as TRACES_RECORD
from research.alignment.states import ModelTraces, TracingPlan, halves, record_models, training_states
from research.ledger.claims import CLAIM_TAU
from research.ledger.plan import DISTANCES, FITTED, INFERENCE, NOISE, TRACES
from research.ledger.rows import DrawnMeans, StudyCell
from research.tables import table_lines

COLUMNS = pa.schema(
    [pa.field("recipe", pa.string())]
    + [pa.field(f"{name}{part}", pa.float64()) for name in ("delta_r", "mean_w1") for part in ("", "_low", "_high")]
)
TRACED_SLOTS = 4
NUM_LAYOUT_DRAWS = 8
NUM_BOOTSTRAP = 500
MOST_SIZES = "mean_w1 where delta_r < 0.5"
"""Decided after the results. `mean_w1` is a mean over the sizes that a row shares with inference. A row that shares
few sizes, as teacher forcing with its groups of single blocks, has a mean over few states."""


@dataclass(frozen=True, kw_only=True)
class RowDistance:
    """A recipe's states against inference's: total variation of the running-sets' sizes, and the mean Wasserstein-1
    of mask ratios over the sizes that both sides have (`None` where they share none)."""

    recipe: str
    delta_r: Interval
    mean_w1: Interval | None


def measure_inference(out: Path, base: Path, *, num_problems: int) -> Path:
    """The file of noise fitted to the base's traces under MultiBD, with the distances of all rows beside it.

    It is measured once, before anything is trained with it. Raises `ValueError` if another number of problems was
    traced.
    """
    folder = out / "alignment" / INFERENCE
    if folder.exists():
        record = folder / TRACES / TRACES_RECORD
        traced = parse_json(record.read_bytes(), str(record))["asked"]["num_problems"]
        if traced != num_problems:
            raise ValueError(f"{folder} is of {traced} traced problems: give --traced {traced}, or another folder")
    else:
        plan = TracingPlan(
            task=LEDGER_TASK[0],
            num_problems=num_problems,
            seed=0,
            max_tokens=find_task(LEDGER_TASK[0]).max_tokens,
            buffer_size=TRACED_SLOTS,
            decoding={"tau_m2t": CLAIM_TAU},
        )
        with folder_beside(folder, "measured inference") as stage:
            model = read_folder(base)
            (traces,) = record_models({"base": model}, plan, stage / TRACES)
            size = model.config.block_size  # a study trains in its base's blocks
            states = {recipe.name: replace(recipe.states, block_size=size) for recipe in ABLATION_ROWS.values()}
            distances, noise = measure_rows(traces, states, draws=NUM_LAYOUT_DRAWS, seed=0)
            write_distances(stage / DISTANCES, distances)
            write_noise(stage / NOISE, noise)
    return folder / NOISE


def measure_rows(
    traces: ModelTraces, states: Mapping[str, StateConfig], *, draws: int, seed: int
) -> tuple[list[RowDistance], FittedNoise]:
    """The distances of every recipe's states, and of `FITTED`: `LEDGER_MBD` with the returned noise."""
    noise, inference, examples = halves(traces)
    method = states[LEDGER_MBD.name]
    fitted_config = replace(method, schedule="fitted", bounds=replace(method.bounds, fitted=noise))
    distances = []
    for recipe, config in {**states, FITTED: fitted_config}.items():
        training = training_states(examples, config, draws=draws, seed=seed)
        d = compare(inference, training, num_bootstrap=NUM_BOOTSTRAP, seed=seed)
        distances.append(RowDistance(recipe=recipe, delta_r=d.delta_r, mean_w1=d.mean_w1))
    return distances, noise


def write_distances(path: Path, distances: Sequence[RowDistance]) -> None:
    rows = []
    for entry in distances:
        row: dict[str, str | float | None] = {"recipe": entry.recipe}
        for name, distance in (("delta_r", entry.delta_r), ("mean_w1", entry.mean_w1)):
            if distance is not None:
                row |= {name: distance.value, f"{name}_low": distance.low, f"{name}_high": distance.high}
        rows.append(row)
    with file_beside(path) as file:
        pq.write_table(pa.Table.from_pylist(rows, schema=COLUMNS), file)


def read_distances(path: Path) -> list[RowDistance]:
    """The content of `write_distances`'s file. Raises `ValueError` for any other file."""
    try:
        rows = pq.read_table(path, schema=COLUMNS).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read as distances: {str(error).splitlines()[0]}") from None

    def distance(row: dict[str, float], name: str) -> Interval:
        return Interval(value=row[name], low=row[f"{name}_low"], high=row[f"{name}_high"])

    return [
        RowDistance(
            recipe=row["recipe"],
            delta_r=distance(row, "delta_r"),
            mean_w1=None if row["mean_w1"] is None else distance(row, "mean_w1"),
        )
        for row in rows
    ]


FEWEST = 3
MOST_EXACT = 9
"""The largest number of values whose orders (362,880) are all tried."""


@dataclass(frozen=True, kw_only=True)
class RankCorrelation:
    """For `n` pairs: rho, its interval over draws of the outcomes, and the p-value, the share of orders whose rho is
    at least as far from 0."""

    n: int
    rho: Interval
    p_value: float


def ranks(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The ranks of the values (R,), or of each column (R, D), from 1; equal values have their mean."""
    values = np.asarray(values, dtype=float)
    is_below, is_equal = values[None] < values[:, None], values[None] == values[:, None]
    return is_below.sum(1) + (is_equal.sum(1) + 1) / 2


def spearman(first: Sequence[float] | np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of `first` (R,) with each column of `second` (R, D); NaN where one side is
    constant."""
    a_R, b_RD = ranks(first), ranks(second)
    a_R, b_RD = a_R - a_R.mean(), b_RD - b_RD.mean(axis=0)
    spread_D = np.sqrt((a_R @ a_R) * (b_RD**2).sum(axis=0))
    return np.divide(a_R @ b_RD, spread_D, out=np.full(len(spread_D), math.nan), where=spread_D > 0)


@lru_cache(maxsize=2)
def _orders(n: int) -> np.ndarray:
    """All orders of n places."""
    return np.array(list(itertools.permutations(range(n))), dtype=np.int8)


def rank_correlation(distances: Sequence[float], outcomes_RD: np.ndarray) -> RankCorrelation:
    """The correlation of rows' distances with their outcomes (R, D), whose first draw is the measurement.

    The interval covers other evaluations and training seeds of these very rows. The p-value says how likely so few
    rows show such a correlation by chance. Raises `ValueError` for fewer than three rows, for more rows than the test
    can try, and for rows that are all alike.
    """
    n = len(distances)
    if not FEWEST <= n <= MOST_EXACT:
        raise ValueError(f"a rank correlation of {n} rows has no exact test here: give {FEWEST} to {MOST_EXACT}")
    rho_D = spearman(distances, outcomes_RD)
    if math.isnan(rho_D[0]):
        raise ValueError("all rows have the same distance, or the same outcome: their ranks say nothing")
    a, b = ranks(distances), ranks(outcomes_RD[:, 0])
    a, b = a - a.mean(), b - b.mean()
    products, product = b[_orders(n)] @ a, abs(float(a @ b))
    p_value = float((np.abs(products) >= product - 1e-9).mean())
    return RankCorrelation(n=n, rho=Interval.of_weightings(rho_D), p_value=p_value)


def correlations(distances: Sequence[RowDistance], means: DrawnMeans) -> dict[str, RankCorrelation]:
    """Each distance's correlation with each outcome, by their names, under MultiBD with each buffer size.

    Rows without the distance, or without answers, are left out.
    """
    curves = means.rows.curves
    values_of = {
        "delta_r": {d.recipe: d.delta_r.value for d in distances},
        "mean_w1": {d.recipe: d.mean_w1.value for d in distances if d.mean_w1},
        MOST_SIZES: {d.recipe: d.mean_w1.value for d in distances if d.mean_w1 and d.delta_r.value < 0.5},
    }
    correlated = {}
    for size in means.rows.buffer_sizes:
        for name, by_recipe in values_of.items():
            recipes = [recipe for recipe in by_recipe if (recipe, size) in curves]
            if name == MOST_SIZES and len(recipes) < FEWEST:  # with another base, too few rows may share their sizes
                continue
            cells = [StudyCell(recipe, size, CLAIM_TAU) for recipe in recipes]
            outcomes = {
                "accuracy": [means.mean(cell, "accuracy") for cell in cells],
                "NFE": [means.mean(cell, "nfe") for cell in cells],
                "AUP": [means.aup(curves[recipe, size]) for recipe in recipes],
            }
            for outcome, values_RD in outcomes.items():
                correlation = rank_correlation([by_recipe[recipe] for recipe in recipes], np.stack(values_RD))
                correlated[f"{name}, {outcome}, {size} slots"] = correlation
    return correlated


def distance_lines(
    distances: Sequence[RowDistance], correlated: Mapping[str, RankCorrelation], *, names: Mapping[str, str]
) -> list[str]:
    """The section of the report: the distances, and their rank correlations with the outcomes."""
    rows = [
        [
            names.get(entry.recipe, entry.recipe),
            *("-" if d is None else d.text(".3f") for d in (entry.delta_r, entry.mean_w1)),
        ]
        for entry in distances
    ]
    lines = ["## Distances from inference", ""]
    lines += table_lines(["Recipe", "δ_R [95 %]", "mean W1 [95 %]"], rows, num_text=1)
    lines += [
        "",
        "A negative correlation with accuracy or AUP says that nearer rows do better; with NFE, a positive one.",
        "δ_R and W1 are lower bounds. W1 is the sum over a running-set's slots, its mean over the sizes that a row "
        "shares with inference. Their intervals are over the traced problems alone; no p-value is corrected. "
        f"`{MOST_SIZES}` leaves out rows that share less than half; it was decided after the results were seen.",
        "",
    ]
    heads = ["Distance, outcome", "Rows", "Spearman's rho [95 %]", "p, all orders"]
    tests = [[pair, entry.n, entry.rho.text("+.2f"), p_text(entry.p_value)] for pair, entry in correlated.items()]
    return [*lines, *table_lines(heads, tests, num_text=1), ""]
