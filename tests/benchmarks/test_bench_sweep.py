"""The cost of a sweep over the engine: its arithmetic, and a toy run whose sweep has no Ray under it."""

from dataclasses import replace
from pathlib import Path

import pytest
from sweep_cluster import put_in_place

from benchmarks.evaluation import SweepCost, num_differences, problems_in
from benchmarks.evaluation import sweep as main

COST = SweepCost(num_samples=80, num_differing=1, load=2.0, decode=298.0, ray_start=15.0, sweep=324.0)


def test_the_ratio_leaves_the_start_of_ray_out_and_has_the_load_on_both_sides() -> None:
    assert COST.ratio == pytest.approx(1.08) and COST.ratio_with_start == pytest.approx(1.13)
    assert "sweep / direct: 1.080, with the start of Ray 1.130 (goal: at most 1.10" in COST.text
    assert "| start of Ray | 15.0 |" in COST.text and COST.text.startswith("80 samples, of which 1 have another")
    several = replace(COST, num_actors=2, several_engines=180.0).text
    assert "engines" not in COST.text and "| the same sweep with 2 engines | 180.0 |" in several
    assert "2 engines / 1: 1.80 times as fast (goal: at least 1.70" in several


def test_a_trial_gives_the_length_of_the_run() -> None:
    assert problems_in(300, trial=2.0) == 4800
    assert problems_in(1, trial=60.0) == 32


def test_a_length_that_no_run_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "1e308"]) == 2
    assert "from 1 to 86400" in capsys.readouterr().err


def test_both_runs_must_have_the_same_samples() -> None:
    assert num_differences({1: "a", 2: "b"}, {2: "b", 1: "c"}) == 1
    with pytest.raises(RuntimeError):
        num_differences({1: "a", 2: "b"}, {1: "a"})


def test_a_toy_run_prints_the_table(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = put_in_place(monkeypatch)
    command = ["--model", str(tiny_model_dir), "--tasks", "gsm-mini", "--grid", "tau_m2t=0.05", "--limit", "2"]
    assert main([*command, "--max-rows", "2", "--actors", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("4 samples, of which 0 have another text in the sweep") and "sweep / direct: " in printed
    assert cluster.parts == [1, 0, 1, 0] and not cluster.cases and "the same sweep with 2 engines" in printed
