"""The rows of a study: one graded answer each, small enough to be published, and all that its report needs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

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
class Cell:
    """A recipe under one decoding configuration; `buffer_size` 1 is SingleBD."""

    recipe: str
    buffer_size: int
    tau_m2t: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PairedRows:
    """The answers of every cell to the same problems (P), in the same order.

    seed_P      the seed that a problem belongs to, as a number from 0
    correct     cell -> (P,) of 0 and 1; forwards, tokens: counts
    """

    seeds: tuple[int, ...]
    seed_P: np.ndarray
    correct: Mapping[Cell, np.ndarray]
    forwards: Mapping[Cell, np.ndarray]
    tokens: Mapping[Cell, np.ndarray]

    @property
    def cells(self) -> list[Cell]:
        return sorted(self.correct)

    @property
    def num_problems(self) -> int:
        return len(self.seed_P)

    def tpf(self, cell: Cell) -> np.ndarray:
        """Useful tokens per forward of each answer (P,)."""
        return self.tokens[cell] / self.forwards[cell]


def sweep_rows(folder: Path, recipes: Mapping[str, str]) -> pa.Table:
    """The rows of a seed's sweep, whose models are `recipes` by name; `ValueError` for one that could not be
    decoded."""
    rows: list[dict[str, Any]] = []
    for row in read_samples(folder, columns=READ):
        if row["error"] is not None:
            raise ValueError(f"{folder}: {row['problem_id']} of {row['model']} could not be decoded: {row['error']}")
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
    """Write the rows of all seeds, compressed, in an order that depends on nothing but them."""
    with file_beside(path) as beside:
        pq.write_table(pa.concat_tables(tables).sort_by(ORDER), beside, compression="zstd")


def read_rows(paths: Iterable[Path]) -> PairedRows:
    """The rows of one study, or of several on the same problems.

    Raises `ValueError` for a file that holds none, and for cells that do not have the same problems.
    """
    rows = pa.concat_tables([_table(path) for path in paths]).sort_by(ORDER)
    if not len(rows):
        raise ValueError("there are no rows")
    tables = {Cell(**cell): _of_cell(rows, cell) for cell in rows.group_by(CELL).aggregate([]).to_pylist()}
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


def _table(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read as rows of a study: {str(error).splitlines()[0]}") from None
    if table.schema.names != COLUMNS.names:
        raise ValueError(f"{path} holds no rows of a study: its columns are {', '.join(table.schema.names)}")
    return table
