"""Both ways bring the weights of a URL into the memory of all ranks; what came is counted."""

from pathlib import Path

import pytest

from benchmarks.remote_weights import remote
from tests.support.clusters.file_server import file_server


def test_both_ways_are_measured(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with file_server(tiny_model_dir.parent) as server:
        remote(["--model", f"{server.url}/{tiny_model_dir.name}", "--ranks", "2"])
        assert [name for name, _, _ in server.asked if name.endswith(".safetensors")]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 2")]
    assert ["cache" in row for row in rows] == [True, False] and "stream" in rows[1]
    assert not list(tmp_path.glob("mbd-remote-*"))


def test_a_folder_that_lies_here_is_refused_before_it_is_measured(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.remote_weights.measure_ways", lambda *_: pytest.fail("it was measured"))
    assert remote(["--model", str(tiny_model_dir)]) == 2
    assert f"--model {tiny_model_dir} is no URL" in capsys.readouterr().err
