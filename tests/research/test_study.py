"""The study's command without a cluster: what is refused, and the report that needs no model."""

from pathlib import Path

import pytest
from drawn_study import study_cells

from mbd_core.storage.folder import JOB_COPY
from research.__main__ import main as research
from research.ledger import study
from research.ledger.plan import ROWS
from research.ledger.rows import write_rows


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["ordering", "--base", "no-such-model"], "no-such-model"),
        (["ordering", "--base", "tiny-bd", "--seeds", "0,x"], "--seeds 0,x must be a list of whole numbers"),
        (["ordering", "--base", "tiny-bd", "--taus", "high"], "--taus high"),
        (["ordering", "--base", "tiny-bd", "--buffers", "1"], "at least 2"),
        (["ablation", "--base", "tiny-bd"], "run ordering first"),
        (["alignment", "--base", "tiny-bd"], "run ordering first"),
        (["ordering", "--report-only"], "cannot be read as rows of a study"),
        (["sideways"], "sideways"),
    ],
)
def test_bad_input_is_one_sentence(
    argv: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main([*argv, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["ledger ordering --base tiny-bd", "rl", "teacher", "long", "signal"])
def test_a_place_that_cannot_be_written_is_refused(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("a file")
    assert research([*line.split(), "--out", str(tmp_path / "file")]) == 2
    sentence = f"{tmp_path / 'file'} cannot be written: {tmp_path / 'file'}: Not a directory; give another place\n"
    assert capsys.readouterr().err.endswith(": " + sentence)


def test_a_url_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert study.main(["ordering", "--base", "tiny-bd", "--out", "s3://bucket/study"]) == 2
    assert "--out s3://bucket/study is a URL" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_a_folder_that_would_go_with_a_submitted_job_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / JOB_COPY / "job"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    assert study.main(["ordering", "--base", "tiny-bd", "--out", "out"]) == 2
    assert "give an absolute path" in capsys.readouterr().err and not any(copy.iterdir())


def test_the_report_is_written_from_the_rows_without_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study.Study, "compute", lambda *_, **__: pytest.fail("something was computed"))
    recipes = {"base": (0.7, 60), "ledger-tf": (0.75, 50), "ledger-mbd": (0.8, 40)}
    write_rows(tmp_path / "ordering" / ROWS, [study_cells(recipes)])
    assert study.main(["ordering", "--report-only", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == (tmp_path / "ordering" / "study.md").read_text().strip()
