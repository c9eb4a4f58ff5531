"""A sweep's folder: nothing of the user's is touched, and what was written is read back."""

from pathlib import Path

import pyarrow as pa
import pytest
from sweep_rows import report_rows

from mbd_core.evaluation.sweep_folder import (
    REPORT,
    check_sweep_folder,
    claim_sweep_folder,
    read_report,
    read_samples,
    write_report,
    write_samples,
)
from mbd_core.evaluation.sweep_report import build_aup
from mbd_core.files import MANIFEST

LABELS = {"a": "A", "b": "B"}


def write_sweep(folder: Path, *, overwrite: bool = False, num_parts: int = 2) -> str:
    """A whole sweep of `num_parts` tables of samples."""
    claim_sweep_folder(folder, overwrite=overwrite)
    for number in range(num_parts):
        write_samples(folder, number, pa.table({"sample": [2 * number, 2 * number + 1]}))
    rows = report_rows()
    return write_report(folder, rows, build_aup(rows), labels=LABELS, settings={"seed": 7})


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    text = write_sweep(tmp_path / "out")
    parts = {"samples/part-00000.parquet", "samples/part-00001.parquet"}
    assert files(tmp_path / "out") == {*parts, "plot.png", "report.md", REPORT, MANIFEST}
    assert (tmp_path / "out" / "report.md").read_text() == text
    assert [row["sample"] for row in read_samples(tmp_path / "out")] == [0, 1, 2, 3]
    report = read_report(tmp_path / "out")
    assert [row["accuracy"] for row in report["rows"]] == [row.summary.accuracy for row in report_rows()]
    assert report["settings"] == {"seed": 7}


def test_a_folder_without_a_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no report.json"):
        read_report(tmp_path)


def test_a_sweep_replaces_only_a_sweep_and_only_when_told_to(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_sweep(out)
    with pytest.raises(ValueError, match="holds a sweep; give another folder, or --overwrite"):
        check_sweep_folder(out)
    check_sweep_folder(out, overwrite=True)
    write_sweep(out, overwrite=True, num_parts=1)
    assert [row["sample"] for row in read_samples(out)] == [0, 1], "no part of the earlier sweep is left"


def test_an_interrupted_sweep_can_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    claim_sweep_folder(out)
    write_samples(out, 0, pa.table({"sample": [0]}))
    (out / "samples" / ".part-00001.parquet.123.partial.parquet").write_text("cut")  # killed while it wrote
    write_sweep(out, overwrite=True)
    assert ".part-00001.parquet.123.partial.parquet" not in str(files(out))


@pytest.mark.parametrize("name", ["notes.txt", "samples/notes.parquet", "samples/mine/part-0.txt", "report.html"])
def test_a_file_of_the_user_s_is_never_touched(tmp_path: Path, name: str) -> None:
    """Neither in a folder without our manifest, nor beside our files in one that has it."""
    foreign, ours = tmp_path / "foreign", tmp_path / "ours"
    write_sweep(ours)
    for folder in (foreign, ours):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
        listed = files(folder)
        with pytest.raises(ValueError, match=r"not written by this project"):
            claim_sweep_folder(folder, overwrite=True)
        assert files(folder) == listed
        assert (folder / name).read_text() == "precious"
