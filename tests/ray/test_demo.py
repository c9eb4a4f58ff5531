"""The demo refuses to replace what it did not write, before it starts a cluster."""

from pathlib import Path

import pytest

from jobs import demo


@pytest.mark.parametrize("name", ["trained", "sweep"])
def test_a_folder_of_the_user_s_is_refused_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "local_cluster", lambda: pytest.fail("a cluster was started"))
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("precious")
    assert demo.main(["--out", str(tmp_path)]) == 2
    assert f"{tmp_path / name} exists already and was not written by this project" in capsys.readouterr().err
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.txt")] == [f"{name}/notes.txt"]
