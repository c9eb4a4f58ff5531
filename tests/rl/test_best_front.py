"""The best model by held-out problems is kept, and a run ends once it has waited long enough for a better one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import finish, tiny_run
from safetensors.torch import load_file

from mbd_core.rl import loop
from mbd_core.rl.config import HeldOutConfig, RLRecipe
from mbd_core.rl.folder import HELD_OUT, ITERATIONS
from mbd_core.rl.record import sweeps_since_best

ACCURACIES = (0.1, 0.5, 0.3, 0.2, 0.9, 0.0)


@pytest.fixture
def fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps find these accuracies."""

    def front_line(version: int, threshold: float, summary: object) -> dict[str, float]:
        return {"iteration": version, "tau_m2t": threshold, "accuracy": ACCURACIES[version], "tpf": 2.0}

    monkeypatch.setattr(loop, "front_line", front_line)


def swept(model: Path, *, iterations: int = 5, **held_out: Any) -> RLRecipe:
    sweeps = HeldOutConfig(evaluate_every=1, held_out=2, thresholds=(0.9,), **held_out)
    return tiny_run(model, iterations=iterations, held_out=sweeps, checkpoint_every=5)


def numbers(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_sweeps_are_counted_since_the_first_of_the_best() -> None:
    def sweeps(*values: float) -> list[dict[str, float]]:
        points = ((n, each) for n, value in enumerate(values) for each in (value, value / 2))
        return [{"iteration": n, "accuracy": accuracy, "tpf": 3.0} for n, accuracy in points]

    assert [sweeps_since_best(sweeps(*values)) for values in ((), (1,), (1, 2), (2, 1), (1, 2, 2, 0))] == [
        0,
        0,
        0,
        1,
        2,
    ]


@pytest.mark.usefixtures("fronts")
def test_the_best_is_kept_and_a_run_ends_without_a_better_one(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(swept(tiny_model_dir, patience=2), tmp_path / "run")
    assert [line["iteration"] for line in numbers(tmp_path / "run", HELD_OUT)] == [0, 1, 2, 3]
    assert len(numbers(tmp_path / "run", ITERATIONS)) == 3
    assert "the run ends: 2 sweeps in a row had no better front (--patience 2)" in capsys.readouterr().out
    finish(swept(tiny_model_dir, iterations=1), tmp_path / "one")
    best, one, last = (
        load_file(tmp_path / name / "model.safetensors") for name in ("run/best", "one/model", "run/model")
    )
    assert all(torch.equal(best[name], one[name]) for name in one)
    assert not all(torch.equal(best[name], last[name]) for name in last)

    executor, model = finish(swept(tiny_model_dir, patience=2), tmp_path / "run", resume=True)
    assert "update" not in executor.calls and all(torch.equal(model[name], last[name]) for name in last)
    executor, _ = finish(swept(tiny_model_dir), tmp_path / "run", resume=True)  # it waits no more, and goes on
    assert executor.calls.count("update") == 2 and len(numbers(tmp_path / "run", ITERATIONS)) == 5
    four = load_file(tmp_path / "run" / "best" / "model.safetensors")
    assert not all(torch.equal(four[name], best[name]) for name in best)


@pytest.mark.usefixtures("fronts")
def test_a_run_may_keep_none(tiny_model_dir: Path, tmp_path: Path) -> None:
    finish(swept(tiny_model_dir, iterations=1, keep_best=False), tmp_path / "run")
    assert (tmp_path / "run" / "model").is_dir() and not (tmp_path / "run" / "best").exists()


def test_patience_without_sweeps_is_refused() -> None:
    with pytest.raises(ValueError, match="patience=2 counts sweeps"):
        HeldOutConfig(evaluate_every=0, patience=2)
