"""The engine benchmark: steps timed, ratios of rows, tables; what cannot be measured is refused before any work."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import engine as step_rows
from benchmarks.commands import engine as bench_engine
from benchmarks.engine import buffer_ratios, host_growth
from benchmarks.measuring import interleaved, markdown
from benchmarks.step_timing import StepCase, filled_engine, measure_step
from mbd_core.models.shapes import SHAPES, random_model


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
        (["--buffer", "1,x"], "--buffer 1,x"),
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


CPU = torch.device("cpu")


@pytest.mark.parametrize("static", [False, True])
def test_a_filled_engine_decodes_with_all_slots_in_use(static: bool) -> None:
    case = StepCase(rows=3, buffer_size=2, prefix=64, steps=3, static=static, trace=True)
    model = random_model(SHAPES["sdar-null"], device=CPU, dtype=torch.float32)
    engine = filled_engine(model, case)
    times = measure_step(engine, case)
    assert times.num_tokens == 3 * 2 * 32, "every slot of every row is in the forward"
    assert 0 < times.num_logits <= times.num_tokens
    for value in (times.step, times.forward, times.layout, times.recorder):
        assert value is not None and value > 0
    assert engine.num_running == 3
    engine.check_integrity()
    committed = [s.committed for s in engine.scheduler.running.values()]
    assert all(64 <= c < 64 + case.num_tokens(32) for c in committed)


def test_measuring_changes_no_token() -> None:
    """A forward that is run again stores the same keys: the measured engine goes on as an unmeasured one."""
    case = StepCase(rows=2, buffer_size=2, prefix=32, steps=4)
    model = random_model(SHAPES["sdar-null"], device=CPU, dtype=torch.float32, std=0.5)
    tokens = []
    for measured in (True, False):
        torch.manual_seed(0)
        engine = filled_engine(model, case)
        if measured:
            measure_step(engine, case)
        while engine.num_running == 2 and min(s.committed for s in engine.scheduler.running.values()) < 32 * 3:
            engine.step()
        tokens.append([s.tokens[: 32 * 3] for s in engine.scheduler.running.values()])
    assert tokens[0] == tokens[1]


def test_runs_take_turns_and_begin_in_turn() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = interleaved({name: lambda name=name: run(name) for name in "abc"}, repeats=3)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab"
    assert taken["a"] == [1.0, 6.0, 8.0]
    with pytest.raises(ValueError, match="repeats=0"):
        interleaved({}, repeats=0)


def test_ratios_compare_like_with_like() -> None:
    def row(rows: int, buffer_size: int, step: float, host: float) -> dict[str, object]:
        return {
            "model": "m",
            "rows": rows,
            "buffer_size": buffer_size,
            "prefix": 64,
            "step_seconds": step,
            "host_seconds": host,
            "forward_seconds": 1.0,
        }

    table = [row(1, 1, 2.0, 1.0), row(1, 2, 3.0, 1.0), row(8, 2, 9.0, 3.0)]
    (ratio,) = buffer_ratios(table)
    assert (ratio["rows"], ratio["step_over_single"], ratio["paper"]) == (1, 1.5, 1.24)
    (growth,) = host_growth(table)
    assert (growth["buffer_size"], growth["from_rows"], growth["to_rows"]) == (2, 1, 8)
    assert (growth["growth"], growth["growth_beside_forward"]) == (3.0, 4.0)


def test_a_table_shows_milliseconds_and_gaps() -> None:
    text = markdown([{"a": 0.0015, "b": True}, {"a": 0.002}], {"a": "step (ms)|.1f", "b": "ok"})
    assert text.splitlines() == ["| step (ms) | ok |", "|---|---|", "| 1.5 | yes |", "| 2.0 | - |"]
