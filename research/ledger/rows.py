"""The rows of a study, one graded answer each, and their measures: means, differences and AUPs in each draw.

The rows are all that a study's report needs, and small enough to be published. All cells are measured on the same
draws of a bootstrap in two levels, seeds and their problems, so that a difference of two cells is paired by seed and
problem.

Shape legend: P problems; D draws, the first of which is the rows themselves; S seeds; K points of a curve.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mbd_core.evaluation.measures.aup import aup_d3llm
from mbd_core.evaluation.measures.statistics import NUM_DRAWS, bootstrap, sign_test
from mbd_core.evaluation.sweep.folder import read_samples
from mbd_core.files import file_beside

COLUMNS = pa.schema(
    [
        pa.field("recipe", pa.string()),
        pa.field("seed", pa.int32()),
        pa.field("problem", pa.string()),
        pa.field("buffer_size", pa.int16()),
        pa.field("tau_m2t", pa.float64()),
        pa.field("correct", pa.bool_()),
        pa.field("num_tokens", pa.int32()),
        pa.field("num_forwards", pa.int32()),
    ]
)
CELL = ["recipe", "buffer_size", "tau_m2t"]
ORDER = [(name, "ascending") for name in (*CELL, "seed", "problem")]
READ = ("model", "problem_id", "seed", "config", "correct", "num_tokens", "num_forwards", "error")


@dataclass(frozen=True, order=True)
class StudyCell:
    """A recipe under one decoding configuration; `buffer_size` 1 is SingleBD."""

    recipe: str
    buffer_size: int
    tau_m2t: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedRows:
    """The answers of every cell to the same problems (P), in the same order.

    seed_P      a problem's seed, as a number from 0
    correct     cell -> (P,) of 0 and 1; forwards, tokens: counts
    """

    seeds: tuple[int, ...]
    seed_P: np.ndarray
    correct: Mapping[StudyCell, np.ndarray]
    forwards: Mapping[StudyCell, np.ndarray]
    tokens: Mapping[StudyCell, np.ndarray]

    @property
    def cells(self) -> list[StudyCell]:
        return sorted(self.correct)

    @property
    def curves(self) -> dict[tuple[str, int], list[StudyCell]]:
        """The cells of each recipe and buffer size, over the thresholds."""
        curves: dict[tuple[str, int], list[StudyCell]] = {}
        for cell in self.cells:
            curves.setdefault((cell.recipe, cell.buffer_size), []).append(cell)
        return curves

    @property
    def buffer_sizes(self) -> list[int]:
        """The buffer sizes of MultiBD."""
        return sorted({cell.buffer_size for cell in self.cells} - {1})

    @property
    def num_problems(self) -> int:
        return len(self.seed_P)

    def tpf(self, cell: StudyCell) -> np.ndarray:
        """Useful tokens per forward of each answer (P,)."""
        return self.tokens[cell] / self.forwards[cell]


def sweep_rows(folder: Path, recipes: Mapping[str, str]) -> pa.Table:
    """The rows of a seed's sweep, whose models are `recipes` by name. Raises `ValueError` for an answer that was not
    decoded."""
    return study_rows(read_samples(folder, columns=READ), recipes, source=folder)


def study_rows(samples: Iterable[Mapping[str, Any]], recipes: Mapping[str, str], *, source: Path) -> pa.Table:
    """Graded samples as rows of a study. Raises `ValueError` for a sample that was not decoded."""
    rows: list[dict[str, Any]] = []
    for row in samples:
        if row["error"] is not None:
            raise ValueError(f"{source}: {row['problem_id']} of {row['model']} could not be decoded: {row['error']}")
        config = json.loads(row["config"])
        rows.append(
            {
                "recipe": recipes[row["model"]],
                "seed": row["seed"],
                "problem": row["problem_id"],
                "buffer_size": config["buffer_size"],
                "tau_m2t": config["tau_m2t"],
                **{name: row[name] for name in ("correct", "num_tokens", "num_forwards")},
            }
        )
    return pa.Table.from_pylist(rows, schema=COLUMNS)


def write_rows(path: Path, tables: Sequence[pa.Table]) -> None:
    """Writes the rows of all seeds, compressed, in an order that depends on the rows alone."""
    with file_beside(path) as file:
        pq.write_table(pa.concat_tables(tables).sort_by(ORDER), file, compression="zstd")


def read_rows(paths: Iterable[Path]) -> PairedRows:
    """The rows of one study, or of several on the same problems.

    Raises `ValueError` for a file without such rows, and for cells that do not have the same problems.
    """
    return paired_rows(pa.concat_tables([read_table(path) for path in paths]))


def paired_rows(table: pa.Table) -> PairedRows:
    """The rows (`COLUMNS`) of cells with the same problems; raises as `read_rows`."""
    rows = table.sort_by(ORDER)
    if not len(rows):
        raise ValueError("there are no rows")
    tables = {StudyCell(**cell): _of_cell(rows, cell) for cell in rows.group_by(CELL).aggregate([]).to_pylist()}
    first, *others = sorted(tables)
    problems = tables[first].select(["seed", "problem"])
    for cell in others:
        if not tables[cell].select(["seed", "problem"]).equals(problems):
            raise ValueError(f"{cell} has other problems than {first}: the study is not finished")
    seeds, seed_P = np.unique(problems["seed"].to_numpy(), return_inverse=True)
    if len(problems) != len(problems.group_by(["seed", "problem"]).aggregate([])):
        raise ValueError(f"{first} has a problem twice: the files are of several studies")
    return PairedRows(
        seeds=tuple(int(seed) for seed in seeds),
        seed_P=seed_P,
        correct={cell: _numbers(table, "correct") for cell, table in tables.items()},
        forwards={cell: _numbers(table, "num_forwards") for cell, table in tables.items()},
        tokens={cell: _numbers(table, "num_tokens") for cell, table in tables.items()},
    )


def _of_cell(rows: pa.Table, cell: Mapping[str, Any]) -> pa.Table:
    mask = np.ones(len(rows), dtype=bool)
    for name, value in cell.items():
        mask &= pc.equal(rows[name], value).to_numpy()
    return rows.filter(pa.array(mask)).combine_chunks()


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    return table[name].cast(pa.float64()).to_numpy()


def read_table(path: Path) -> pa.Table:
    """The rows in a file. Raises `ValueError` if it holds no study's rows."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read as rows of a study: {str(error).splitlines()[0]}") from None
    if table.schema.names != COLUMNS.names:
        raise ValueError(f"{path} holds no rows of a study: its columns are {', '.join(table.schema.names)}")
    return table


Measure = Literal["accuracy", "nfe", "tpf"]


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """McNemar's exact test of two cells. It counts the problems that only one of the two has right.

    `p_value` is the chance of a split as uneven as this if each such problem were decided by a fair coin.
    """

    first_only: int
    second_only: int

    @property
    def p_value(self) -> float:
        return sign_test(self.first_only, self.second_only)


def mcnemar(rows: PairedRows, first: StudyCell, second: StudyCell) -> McNemar:
    first_right, second_right = rows.correct[first] > 0, rows.correct[second] > 0
    return McNemar(
        first_only=int((first_right & ~second_right).sum()), second_only=int((second_right & ~first_right).sum())
    )


class DrawnMeans:
    """The means of every cell under the same draws: blocks (D, P) of each problem's weight."""

    def __init__(self, rows: PairedRows, blocks: Iterable[np.ndarray]) -> None:
        self.rows = rows
        columns_PC = np.stack(
            [
                column
                for cell in rows.cells
                for column in (100.0 * rows.correct[cell], rows.forwards[cell], rows.tpf(cell))
            ],
            axis=1,
        )
        means_DC = np.concatenate([draws_DP @ columns_PC / draws_DP.sum(1, keepdims=True) for draws_DP in blocks])
        self._means_DCM = means_DC.reshape(len(means_DC), len(rows.cells), 3)

    @cached_property
    def _place(self) -> dict[StudyCell, int]:
        return {cell: place for place, cell in enumerate(self.rows.cells)}

    def mean(self, cell: StudyCell, measure: Measure) -> np.ndarray:
        """The mean in each draw (D,): accuracy in percent, forwards, or useful tokens per forward of an answer."""
        return self._means_DCM[:, self._place[cell], ("accuracy", "nfe", "tpf").index(measure)]

    def difference(self, first: StudyCell, second: StudyCell, measure: Measure) -> np.ndarray:
        """The first cell's mean minus the second's in each draw (D,)."""
        return self.mean(first, measure) - self.mean(second, measure)

    def aup(self, curve: Sequence[StudyCell]) -> np.ndarray:
        """d3LLM's AUP of a curve in each draw (D,); its y_max is the best accuracy of all cells in that draw."""
        points_K2D = np.stack([[self.mean(cell, "tpf"), self.mean(cell, "accuracy")] for cell in curve])
        return aup_d3llm(points_K2D, y_max=self._means_DCM[:, :, 0].max(axis=1))


def bootstrap_means(rows: PairedRows, *, num_draws: int = NUM_DRAWS, seed: int = 0) -> DrawnMeans:
    """The means of the rows themselves, and of draws in two levels: of the seeds, and of each drawn seed's problems.

    A seed stands for a trained model and for its problems. If three seeds differ by more than the chance of their
    problems, the intervals are too narrow. If they differ by less, the intervals are too wide. Reports therefore show
    Student's interval over `each_seed` too. The intervals of a single seed are over its problems alone.
    """
    one_draw = np.ones((1, rows.num_problems))
    return DrawnMeans(rows, chain([one_draw], bootstrap(rows.seed_P, seed=seed, num_draws=num_draws)))


def each_seed(rows: PairedRows) -> DrawnMeans:
    """A draw for each training seed alone: the means are (S,), and an AUP's y_max is that seed's."""
    return DrawnMeans(rows, [np.stack([rows.seed_P == number for number in range(len(rows.seeds))]).astype(float)])
