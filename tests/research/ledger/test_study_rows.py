"""A study's rows: what is written is read again, in the order of the problems, and only whole studies are read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from drawn_study import study_table

from research.ledger import rows as study_rows
from research.ledger.rows import COLUMNS, StudyCell, read_rows, sweep_rows, write_rows

ONE, OTHER = StudyCell("ledger-mbd", 2, 0.9), StudyCell("ledger-tf", 2, 0.9)


def table(**settings: Any) -> pa.Table:
    return study_table({ONE: 0.8, OTHER: 0.6}, {ONE: 20, OTHER: 24}, **settings)


def test_the_rows_of_each_cell_come_back_in_one_order(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", [table(problems=7).take(np.random.default_rng(0).permutation(42))])
    rows = read_rows([tmp_path / "rows.parquet"])
    assert rows.cells == [ONE, OTHER] and rows.seeds == (0, 1, 2) and rows.num_problems == 21
    written = [row for row in table(problems=7).to_pylist() if row["recipe"] == "ledger-tf"]
    written.sort(key=lambda row: (row["seed"], row["problem"]))
    assert rows.correct[OTHER].tolist() == [float(row["correct"]) for row in written]
    assert rows.forwards[OTHER].tolist() == [row["num_forwards"] for row in written]
    assert rows.tpf(OTHER) == pytest.approx([60 / row["num_forwards"] for row in written])
    assert rows.seed_P.tolist() == [row["seed"] for row in written]


def test_rows_of_an_unfinished_study_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", [table(problems=7).slice(0, 41)])
    with pytest.raises(ValueError, match="the study is not finished"):
        read_rows([tmp_path / "rows.parquet"])


def test_rows_of_two_studies_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", [table(problems=7), table(problems=7)])
    with pytest.raises(ValueError, match="has a problem twice: the files are of several studies"):
        read_rows([tmp_path / "rows.parquet"])


def test_another_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("no table")
    with pytest.raises(ValueError, match="cannot be read as rows of a study"):
        read_rows([tmp_path / "rows.parquet"])
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="holds no rows of a study: its columns are x"):
        read_rows([tmp_path / "other.parquet"])


def graded(**changes: Any) -> dict[str, Any]:
    config = json.dumps({"buffer_size": 2, "tau_m2t": 0.9})
    row = {"model": "ledger-mbd-s1", "problem_id": "p", "seed": 1, "config": config, "correct": True}
    return {**row, "num_tokens": 130, "num_forwards": 40, "error": None, **changes}


def test_a_sweep_s_rows_carry_the_recipe_and_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_rows, "read_samples", lambda folder, columns: [graded()])
    (row,) = sweep_rows(Path("sweep"), {"ledger-mbd-s1": "ledger-mbd"}).to_pylist()
    expected = ("ledger-mbd", 1, "p", 2, 0.9, True, 130, 40)
    assert row == dict(zip(COLUMNS.names, expected, strict=True))


def test_an_answer_that_could_not_be_decoded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_rows, "read_samples", lambda folder, columns: [graded(error="too long")])
    with pytest.raises(ValueError, match="too long"):
        sweep_rows(Path("sweep"), {"ledger-mbd-s1": "ledger-mbd"})
