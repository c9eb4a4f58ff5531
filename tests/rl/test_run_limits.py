"""A run ends with the iteration that spends its rollouts or seconds: with its state, its sweep and its model."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from rl_runs import finish, number_lines, timeless_lines, tiny_run

from mbd_core.multitf.step.objective import PolicyObjective
from mbd_core.rl import loop
from mbd_core.rl.config import HeldOutConfig, RLRecipe
from mbd_core.rl.folder import HELD_OUT
from mbd_core.rl.record import SINCE_START


def limited(model: Path, **limits: Any) -> RLRecipe:
    """Eight answers an iteration; without a limit, six iterations with a checkpoint and a sweep after the fifth."""
    sweeps = HeldOutConfig(evaluate_every=5, held_out=2, thresholds=(0.9,))
    return tiny_run(model, iterations=6, held_out=sweeps, checkpoint_every=5, **limits)


@pytest.fixture
def rising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sweep finds a better front."""

    def front_line(version: int, threshold: float, summary: object) -> dict[str, float]:
        return {"iteration": version, "tau_m2t": threshold, "accuracy": version / 10, "tpf": 2.0}

    monkeypatch.setattr(loop, "front_line", front_line)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "trapezoid"])
def test_the_learning_rate_falls_over_all_updates_of_all_iterations(
    tiny_model_dir: Path, schedule: Literal["linear", "cosine", "trapezoid"]
) -> None:
    recipe = tiny_run(tiny_model_dir, iterations=6)
    train, objective = replace(recipe.train, schedule=schedule), PolicyObjective(kind="clipped", passes=3)
    train = replace(recipe, train=train, objective=objective).train
    rates = [train.lr_at(step) for step in range(6 * 3)]
    assert min(rates[:-1]) > 0 and rates[12] > rates[15] > rates[17] >= 0


def swept_after(run: Path) -> list[int]:
    return [line["iteration"] for line in number_lines(run, HELD_OUT)]


@pytest.mark.usefixtures("rising")
def test_rollouts_end_a_run_which_goes_on_as_if_it_had_not_ended(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    executor, two = finish(limited(tiny_model_dir, max_rollouts=9), run)
    said = "the run ends: 16 answers were drawn (--max-rollouts 9)\n"
    assert capsys.readouterr().out.count(said) == 1
    assert executor.calls.count("update") == 2 and executor.calls.count("rollouts") == 4, "none for a third iteration"
    assert swept_after(run) == [0, 2] and (run / "best").is_dir() and (run / "progress.png").is_file()
    assert [path.name for path in (run / "learner").iterdir()] == ["00002.pt"]

    executor, again = finish(limited(tiny_model_dir, max_rollouts=9), run, resume=True)
    assert "update" not in executor.calls and "rollouts" not in executor.calls and said in capsys.readouterr().out
    assert all(torch.equal(again[name], two[name]) for name in two)

    executor, more = finish(limited(tiny_model_dir, max_rollouts=24), run, resume=True)
    _, whole = finish(limited(tiny_model_dir, max_rollouts=24), tmp_path / "whole")
    assert executor.calls.count("update") == 1 and timeless_lines(run) == timeless_lines(tmp_path / "whole")
    assert all(torch.equal(more[name], whole[name]) for name in whole)


def test_seconds_end_a_run_and_those_before_a_resumption_count(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    run = tmp_path / "run"
    finish(limited(tiny_model_dir, max_rollouts=24), run)
    _, second, third = (line[SINCE_START] for line in number_lines(run))

    executor, _ = finish(limited(tiny_model_dir, max_seconds=second + 0.5), tmp_path / "three")
    assert executor.calls.count("update") == 3 and executor.calls.count("rollouts") == 6
    assert f"the run ends: it took {third:.1f} seconds (--max-seconds {second + 0.5:g})" in capsys.readouterr().out
    assert swept_after(tmp_path / "three") == [0, 3]
    assert [path.name for path in (tmp_path / "three" / "learner").iterdir()] == ["00003.pt"]

    executor, _ = finish(limited(tiny_model_dir, max_seconds=third), run, resume=True)
    assert "update" not in executor.calls
    executor, _ = finish(limited(tiny_model_dir, max_seconds=third + 0.5), run, resume=True)
    assert executor.calls.count("update") == 1 and number_lines(run)[-1][SINCE_START] > third


@pytest.mark.parametrize("limits", [{"max_rollouts": -1}, {"max_seconds": -0.5}, {"max_seconds": float("nan")}])
def test_a_limit_that_is_none_is_refused(tiny_model_dir: Path, limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="of at least 0"):
        limited(tiny_model_dir, **limits)
