"""A measurement is printed before its file is written, so a file that cannot be written loses none."""

import errno
from pathlib import Path
from typing import Any

import pytest

from benchmarks import commands, graders, remote_weights, replay, rounding
from mbd_core.command_line import Main

ROUNDED = {"bytes_after": 1, "bytes_before": 2, "dtype": "float32", "max_abs": float("nan")}


def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurements that take long are rows by hand, one of them with a NaN."""
    monkeypatch.setattr(rounding, "rounding_rows", lambda *_, **__: [ROUNDED])
    monkeypatch.setattr(replay, "drawn_answers", lambda *_, **__: (None, [], 1.0))
    monkeypatch.setattr(replay, "replay_rows", lambda *_, **__: [dict.fromkeys(replay.COLUMNS, 1.0)])
    monkeypatch.setattr(replay, "update_seconds", lambda *_, **__: dict.fromkeys(replay.PHASES, 1.0))
    monkeypatch.setattr(graders, "kinds_of", lambda *_, **__: [])
    monkeypatch.setattr(remote_weights, "measure_ways", lambda *_: [remote_weights._row(1, "cache", 1.0, 1)])


TINY_DECODERS = ["--models", "tiny-bd", "--methods", "single", "--requests", "1", "--max-tokens", "4"]
TINY_ENGINE = ["--model", "sdar-null", "--rows", "1", "--prefix", "32", "--buffer", "1", "--steps", "1"]


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (commands.decoders, [*TINY_DECODERS, "--repeats", "1"]),
        (commands.engine, [*TINY_ENGINE, "--device", "cpu"]),
        (commands.rounding, ["--model", "tiny-mbd"]),
        (replay.replay, []),
        (graders.graders, ["--number", "1", "--no-alone"]),
        (remote_weights.remote, ["--model", "http://localhost/model"]),
    ],
    ids=["decoders", "engine", "rounding", "replay", "graders", "remote"],
)
def test_a_file_that_cannot_be_written_loses_no_measurement(
    command: Main,
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def is_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fake(monkeypatch)
    for module in (commands, graders, remote_weights):
        monkeypatch.setattr(module, "write_json", is_full)
    assert command([*argv, "--json", str(tmp_path / "a.json")]) == 1
    said = capsys.readouterr()
    assert "No space left" in said.err and "|---" in said.out
