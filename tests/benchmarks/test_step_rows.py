"""The engine benchmark runs end to end and adds up; what cannot be measured is one sentence, before any work."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import engine as step_rows
from benchmarks.commands import engine as bench_engine


def test_the_engine_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.json"
    argv = ["--model", "sdar-null", "--rows", "1,2", "--buffer", "1,2", "--prefix", "64", "--steps", "2"]
    assert bench_engine([*argv, "--device", "cpu", "--trace", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [(r["rows"], r["buffer_size"]) for r in report["rows"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for row in report["rows"]:
        assert (row["model"], row["prefix"], row["backend"]) == ("sdar-null", 64, "reference")
        assert row["device"].startswith("cpu")
        assert math.isclose(row["step_over_forward"], row["step_seconds"] / row["forward_seconds"])
        assert math.isclose(row["step_over_floor"], row["step_seconds"] / row["floor_seconds"])
        assert math.isclose(row["tps"], row["rows"] * row["tpf"] / row["step_seconds"])
        assert row["trace_cost"] > 0
    assert len(report["buffer_ratios"]) == len(report["host_growth"]) == 2
    shown = capsys.readouterr().out
    assert "| sdar-null | 2 | 2 | 64 |" in shown and "8.78" in shown


def test_the_engine_benchmark_takes_a_folder(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(tiny_model_dir), "--rows", "1", "--buffer", "1", "--prefix", "16", "--steps", "1"]
    assert bench_engine([*argv, "--device", "cpu", "--tpf", "2.5"]) == 0
    assert "| 2.50 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--model", "sdar-9b"], "sdar-9b"),
        (["--model", "llada2-flash", "--dtype", "float32"], "GB"),
        (["--model", "sdar-null", "--prefix", "64,33"], "--prefix 33"),
        (["--model", "sdar-null", "--prefix", "32768"], "positions"),
        (["--model", "sdar-null", "--attention", "magic"], "magic"),
        (["--model", "sdar-null", "--fp8", "experts"], "--fp8 experts"),
        (["--model", "sdar-null", "--eager"], "--eager"),
        (["--model", "sdar-null", "--json", "/proc/none/file.json"], "/proc/none/file.json cannot be written"),
        (["--model", "sdar-null", "--json", "/"], "/ exists already"),
        (["--model", "sdar-null", "--json", "EXISTING"], "a.json exists already"),
        (["--device", "tpu"], "tpu"),
        (["--device", "meta"], "meta"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    argv: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """And is found before anything is measured."""
    monkeypatch.setattr(step_rows, "measure_machine", lambda *_: pytest.fail("the machine was measured"))
    (tmp_path / "a.json").write_text("a user's")
    argv = [str(tmp_path / "a.json") if text == "EXISTING" else text for text in argv]
    if argv[0] != "--device":
        argv = [*argv, "--device", "cpu"]
    assert bench_engine([*argv, "--rows", "1", "--buffer", "1", "--steps", "1"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("engine:")]
    assert named in line
    assert (tmp_path / "a.json").read_text() == "a user's"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--rows", "0"], "--rows 0"),
        (["--buffer", "1,x"], "--buffer x"),
        (["--steps", "0"], "--steps"),
        (["--tpf", "nan"], "--tpf nan"),
        (["--fp8", "some"], "--fp8"),
    ],
)
def test_a_bad_argument_is_one_sentence(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_engine(["--model", "sdar-null", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("engine: ") and named in line


def test_the_job_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_engine(["--help"]) == 0
    assert "--buffer" in capsys.readouterr().out
