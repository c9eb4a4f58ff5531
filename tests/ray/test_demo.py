"""The demo refuses to replace what it did not write, before it starts a cluster, and shows its report once."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs import demo


@pytest.mark.parametrize("name", ["trained", "sweep"])
def test_a_folder_of_the_user_s_is_refused_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.local.local_cluster", lambda: pytest.fail("a cluster was started"))
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("precious")
    assert demo.main(["--out", str(tmp_path)]) == 2
    assert f"{tmp_path / name} exists already and was not written by this project" in capsys.readouterr().err
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.txt")] == [f"{name}/notes.txt"]


def test_the_report_is_printed_once_by_the_sweep_s_own_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cluster: a job prints its log, and writes what it printed."""

    def submit(_cluster: object, *words: str) -> None:
        if "jobs/eval_sweep.py" in words:
            (tmp_path / "sweep").mkdir()
            (tmp_path / "sweep" / "report.md").write_text("# Evaluation sweep\n")
            print("# Evaluation sweep")

    monkeypatch.setattr("cluster.local.local_cluster", lambda: nullcontext(SimpleNamespace(dashboard_url="http://x")))
    monkeypatch.setattr(demo, "submit", submit)
    monkeypatch.setattr(demo, "endpoint", lambda *_: nullcontext("http://x"))
    monkeypatch.setattr(demo, "ask", lambda *_: None)
    assert demo.main(["--out", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert printed.count("# Evaluation sweep") == 1
    assert f"report: {tmp_path / 'sweep' / 'report.md'}" in printed
