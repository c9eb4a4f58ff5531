"""The reports under docs/studies are what their rows give: anybody computes the tables again without training."""

import shutil
from pathlib import Path

import pytest

from mbd_core.studies.ledger.study_plan import ROWS, Experiment
from mbd_core.studies.ledger.study_results import report

PUBLISHED = Path(__file__).resolve().parents[3] / "docs" / "studies"


@pytest.mark.parametrize("experiment", ["ordering"])
def test_a_published_report_is_computed_again_from_its_rows(experiment: Experiment, tmp_path: Path) -> None:
    (tmp_path / experiment).mkdir()
    shutil.copy(PUBLISHED / experiment / ROWS, tmp_path / experiment)
    assert report(tmp_path, experiment) == (PUBLISHED / experiment / "study.md").read_text()
    assert (tmp_path / experiment / "study.png").stat().st_size > 10_000


def test_every_published_folder_is_computed_again_here() -> None:
    assert {folder.name for folder in PUBLISHED.iterdir()} == {"ordering"}
