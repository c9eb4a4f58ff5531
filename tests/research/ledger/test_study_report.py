"""A report is a function of its rows: its numbers are theirs, and the published reports are computed again."""

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from drawn_study import study_cells

from mbd_core.evaluation.measures.statistics import Interval
from mbd_core.multitf.recipes.shipped import ABLATION_ROWS
from research.ledger.claims import RULE
from research.ledger.distances import RowDistance, write_distances
from research.ledger.plan import (
    DISTANCES,
    FITTED,
    INFERENCE,
    PLOT,
    REPORT,
    ROWS,
    TRAINED_RECIPES,
    Experiment,
    row_files,
)
from research.ledger.report import report
from research.ledger.rows import write_rows

RECIPES = {"base": (0.7, 60), "ledger-tf": (0.75, 50), "ledger-mbd": (0.8, 40)}


def test_the_report_is_recomputed_from_the_rows_alone(tmp_path: Path) -> None:
    write_rows(tmp_path / "ordering" / ROWS, [study_cells(RECIPES)])
    first = report(tmp_path, "ordering")
    folder = tmp_path / "ordering"
    (folder / REPORT).unlink()
    picture = (folder / PLOT).read_bytes()
    assert report(tmp_path, "ordering") == first == (folder / REPORT).read_text()
    assert (folder / PLOT).read_bytes() == picture and PLOT in first
    assert RULE in first and first.index(RULE) < first.index("## Claims")


def test_its_numbers_are_those_of_the_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "ordering" / ROWS, [study_cells(RECIPES)])
    text = report(tmp_path, "ordering")
    rows = [
        row
        for row in pq.read_table(tmp_path / "ordering" / ROWS).to_pylist()
        if (row["recipe"], row["buffer_size"], row["tau_m2t"]) == ("ledger-tf", 2, 0.9)
    ]
    accuracy = 100 * np.mean([row["correct"] for row in rows])
    nfe = np.mean([row["num_forwards"] for row in rows])
    line = next(line for line in text.splitlines() if line.startswith("| teacher forcing | 2 | 0.9 |"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[3] == str(len(rows)) == "120"
    assert cells[4].startswith(f"{accuracy:.2f} [") and cells[5].startswith(f"{nfe:.2f} [")


def test_what_several_slots_cost_is_singlebd_minus_multibd(tmp_path: Path) -> None:
    write_rows(tmp_path / "ordering" / ROWS, [study_cells(RECIPES)])
    text = report(tmp_path, "ordering")
    table = pq.read_table(tmp_path / "ordering" / ROWS).to_pylist()
    right = {
        size: [
            row["correct"]
            for row in table
            if (row["recipe"], row["buffer_size"], row["tau_m2t"]) == ("base", size, 0.9)
        ]
        for size in (1, 2)
    }
    lost = 100 * (np.mean(right[1]) - np.mean(right[2]))
    section = text[text.index("## What several slots cost") : text.index("## All cells")]
    line = next(line for line in section.splitlines() if line.startswith("| the base | 2 |"))
    cells = [cell.strip() for cell in line.split("|")[3:-1]]
    assert lost != 0 and [cell.split(" [")[0] for cell in cells] == [f"{lost:+.2f}"] * 2


def test_the_rows_do_not_depend_on_the_order_of_the_sweeps(tmp_path: Path) -> None:
    table = study_cells(RECIPES)
    for name, parts in (("a", [table]), ("b", [table.slice(100), table.slice(0, 100)])):
        write_rows(tmp_path / name / ROWS, parts)
    assert pq.read_table(tmp_path / "a" / ROWS) == pq.read_table(tmp_path / "b" / ROWS)


def test_alignment_sets_the_distances_beside_the_outcomes(tmp_path: Path) -> None:
    """Rows whose accuracy falls with their distance: rho is -1, and with eight rows that is no chance."""
    recipes = [recipe.name for recipe in ABLATION_ROWS.values()]
    outcomes = {name: (0.95 - 0.12 * place, 40 + 4 * place) for place, name in enumerate(recipes)}
    ablation = {recipe.name: outcomes.pop(recipe.name) for recipe in TRAINED_RECIPES["ablation"]}
    write_rows(tmp_path / "ordering" / ROWS, [study_cells({"base": (0.5, 60), **outcomes})])
    write_rows(tmp_path / "ablation" / ROWS, [study_cells(ablation)])
    write_rows(tmp_path / "alignment" / ROWS, [study_cells({FITTED: (0.99, 36)})])
    distances = [
        RowDistance(
            recipe=name,
            delta_r=Interval(value=0.1 * place, low=0.0, high=1.0),
            mean_w1=None if place == 4 else Interval(value=place / 9, low=0.0, high=1.0),
        )
        for place, name in enumerate([FITTED, *recipes])
    ]
    (tmp_path / "alignment" / INFERENCE).mkdir()
    write_distances(tmp_path / "alignment" / INFERENCE / DISTANCES, distances)
    text = report(tmp_path, "alignment")
    line = next(line for line in text.splitlines() if line.startswith("| delta_r, accuracy, 2 slots |"))
    found = re.fullmatch(r"\| delta_r, accuracy, 2 slots \| 9 \| (\S+) \[(\S+), (\S+)\] \| (?:< )?(\S+) \|", line)
    assert found is not None
    assert float(found[1]) < -0.9 and float(found[4]) < 0.01
    assert "| mean_w1, accuracy, 2 slots | 8 |" in text, "a row without the distance is left out"
    assert "| mean_w1 where delta_r < 0.5, accuracy, 2 slots | 4 |" in text
    assert "noise fitted to traces is above chain-uniform" in text


DOCUMENTS = Path(__file__).resolve().parents[3] / "research" / "published"
PUBLISHED: list[tuple[str, Experiment]] = [
    ("ledger", "ordering"),
    ("ledger", "ablation"),
    ("ledger", "alignment"),
    ("ledger", "thresholds"),
    ("ledger-b32", "ordering"),
    ("ledger-without-pages", "ordering"),
]


@pytest.mark.parametrize(("study", "experiment"), PUBLISHED)
def test_a_published_report_is_computed_again_from_its_rows(
    study: str, experiment: Experiment, tmp_path: Path
) -> None:
    published = DOCUMENTS / study / experiment
    for path in row_files(DOCUMENTS / study, experiment):
        shutil.copytree(path.parent, tmp_path / path.parent.name, ignore=shutil.ignore_patterns("study.*"))
    assert report(tmp_path, experiment) == (published / "study.md").read_text()
    assert (tmp_path / experiment / "study.png").stat().st_size > 10_000


def test_every_published_folder_is_computed_again_here() -> None:
    found = [(folder.parent.name, folder.name) for folder in DOCUMENTS.glob("*/*") if folder.is_dir()]
    assert sorted(found) == sorted(PUBLISHED)
