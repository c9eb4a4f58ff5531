"""Published reports are what their rows give: anybody computes the tables again without training."""

import shutil
from pathlib import Path

import pytest

from research.ledger.plan import Experiment, row_files
from research.ledger.report import report

DOCUMENTS = Path(__file__).resolve().parents[3] / "research" / "published"
PUBLISHED: list[tuple[str, Experiment]] = [
    ("ledger", "ordering"),
    ("ledger", "ablation"),
    ("ledger", "alignment"),
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
