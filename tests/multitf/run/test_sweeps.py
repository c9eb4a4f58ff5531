"""Sweeps beside a run: which weights they get, where their numbers go, and that nothing of theirs ends the run."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs import train_multitf
from mbd_core.checkpoint.loading import load_model
from mbd_core.multitf.config import LoraSettings, Sweeping, ValidationOptions
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.recipes.recipe import TrainingRecipe, shortened
from mbd_core.multitf.run import __main__ as plain
from mbd_core.multitf.run import sweeps
from mbd_core.multitf.run.checkpoints import Checkpoints
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.multitf.run.export import export_checkpoint
from mbd_core.multitf.run.log import PLOT
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.run.worker import Run, train_worker
from mbd_core.multitf.step.workers import ALONE
from mbd_core.storage.folder import Folder

NUMBERS = {"sweep_accuracy": 0.25, "sweep_tpf": 2.0}


class Scripted:
    """Sweeps whose futures the test ends."""

    def __init__(self, outcome: Callable[[int, Future[dict[str, float]]], None]) -> None:
        self.outcome, self.begun, self.ended = outcome, list[int](), 0

    def begin(self, step: int) -> Future[dict[str, float]]:
        self.begun.append(step)
        future: Future[dict[str, float]] = Future()
        self.outcome(step, future)
        return future

    def reason(self, error: BaseException) -> str:
        return f"because {error}"

    def end(self) -> None:
        self.ended += 1


def short(recipe: TrainingRecipe, steps: int) -> StartingPoint:
    recipe = shortened(recipe, steps)
    return StartingPoint.read(replace(recipe, train=replace(recipe.train, precision="float32")))


def swept(start: StartingPoint, folder: Path, sweeper: Scripted, *, every: int = 2, best: bool = True) -> Run:
    stored = Checkpoints(Folder.at(folder), ALONE, recipe=start.recipe, keep=1)
    return train_worker(
        start,
        ALONE,
        "replicated",
        stored,
        every=1,
        log_targets=("tensorboard",),
        validation=ValidationOptions(keep_best="sweep_accuracy" if best else "none"),
        sweeping=Sweeping(sweep_every=every),
        sweeper=sweeper,
    )


def written(folder: Path) -> dict[int, float]:
    """The accuracy of each update, counted from 1, that has one."""
    lines = [json.loads(line) for line in (folder / LOSSES).read_text().splitlines()]
    return {line["step"] + 1: line["sweep_accuracy"] for line in lines if "sweep_accuracy" in line}


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4)])
def test_a_sweep_gets_the_weights_of_its_step(
    lora: LoraSettings | None, tiny_recipe: TrainingRecipe, tmp_path: Path
) -> None:
    """The model of each checkpoint, made beside the run, is the one that a run of so many updates writes."""
    recipe = replace(tiny_recipe, train=replace(tiny_recipe.train, lora=lora, schedule="constant", warmup=1))
    start = short(recipe, 4)

    def export(step: int, future: Future[dict[str, float]]) -> None:
        checkpoints = Checkpoints(Folder.at(tmp_path / "run"), ALONE, recipe=start.recipe)
        export_checkpoint(tmp_path / f"model-{step}", start, checkpoints, step)
        future.set_result(NUMBERS)

    run = swept(start, tmp_path / "run", Scripted(export))
    run.write(tmp_path / "whole")
    part = Run(start, ALONE, "replicated")
    part.trainer.config = replace(part.trainer.config, steps=2)
    part.train()
    part.write(tmp_path / "part")
    for one, other in (("model-4", "whole"), ("model-2", "part")):
        pair = [load_model(tmp_path / name, dtype=torch.float32).state_dict() for name in (one, other)]
        assert all(torch.equal(pair[0][name], pair[1][name]) for name in pair[0])
    first, second = (load_model(tmp_path / f"model-{n}", dtype=torch.float32).state_dict() for n in (2, 4))
    assert not all(torch.equal(first[name], second[name]) for name in first)


def test_numbers_stand_at_their_update_whenever_they_come(
    tiny_recipe: TrainingRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweep after 3 ends while another is due after 6, which is skipped; those after 9 and 12 are waited for."""
    start, waiting = short(tiny_recipe, 12), dict[int, Future[dict[str, float]]]()
    sweeper = Scripted(lambda step, future: waiting.update({step: future}))
    request, wait = sweeps.Sweeps.request, sweeps.Sweeps._wait

    def late(self: sweeps.Sweeps, step: int) -> None:
        request(self, step)
        if step == 6:
            assert (tmp_path / "run" / "step_000003").is_dir()  # in use: neither new nor the best
            waiting[3].set_result(NUMBERS)

    def ended(self: sweeps.Sweeps, deadline: float) -> None:
        self.poll()
        for future in waiting.values():
            if not future.done():
                future.set_result(NUMBERS | {"sweep_accuracy": 0.5})
        wait(self, deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps.Sweeps, "request", late)
        patch.setattr(sweeps.Sweeps, "_wait", ended)
        run = swept(start, tmp_path / "run", sweeper, every=3)
    assert sweeper.begun == [3, 9, 12] and written(tmp_path / "run") == {3: 0.25, 9: 0.5, 12: 0.5}
    known = {n: point["sweep_accuracy"] for n, point in enumerate(run.curve, 1) if "sweep_accuracy" in point}
    assert known == written(tmp_path / "run")
    said = capsys.readouterr().out
    assert "sweep after step 6 is skipped: the one after step 3 has not ended" in said
    assert "sweep after step 9: accuracy 50.0 %, TPF 2.00 (the best yet)" in said
    folders = sorted(path.name for path in (tmp_path / "run").glob("step_*"))
    assert {"step_000009", "step_000012"} <= {*folders} and "step_000006" not in folders  # 9 is the best
    assert (tmp_path / "run" / PLOT).is_file()
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    accumulator.Reload()
    logged = {event.step + 1: event.value for event in accumulator.Scalars("sweep/accuracy")}
    assert logged == written(tmp_path / "run")


def test_what_goes_wrong_with_a_sweep_is_a_line(
    tiny_recipe: TrainingRecipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeps, "END_SECONDS", 0.2)

    def outcome(step: int, future: Future[dict[str, float]]) -> None:
        if step == 1:
            raise RuntimeError("no room")
        if step < 4:
            future.set_exception(RuntimeError("it died"))

    start, sweeper = short(tiny_recipe, 4), Scripted(outcome)
    run = swept(start, tmp_path / "run", sweeper, every=1, best=False)
    assert len(run.curve) == 4 and not written(tmp_path / "run") and sweeper.begun[-1] == 4
    said = capsys.readouterr().out
    assert "sweep after step 1 is skipped: because no room" in said
    assert "failed: because it died" in said and "sweep after step 4 is ended" in said and sweeper.ended == 1


def test_a_run_that_goes_on_keeps_the_numbers_of_its_sweeps(tiny_recipe: TrainingRecipe, tmp_path: Path) -> None:
    """Also those that came after the checkpoint was written."""
    sweeper = Scripted(lambda step, future: future.set_result(NUMBERS))
    start = short(tiny_recipe, 4)
    swept(start, tmp_path / "run", sweeper)
    again = swept(start, tmp_path / "run", sweeper)
    assert sweeper.begun == [2, 4] and written(tmp_path / "run") == {2: 0.25, 4: 0.25}
    assert [point.get("sweep_accuracy") for point in again.curve] == [None, 0.25, None, 0.25]


def test_sweeps_that_cannot_be_made_are_refused(
    tiny_recipe: TrainingRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(RECIPES, tiny_recipe.name, tiny_recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jobs.api.training.train_on_cluster", lambda *_, **__: pytest.fail("nothing is to begin"))
    ray = ["--recipe", tiny_recipe.name, "--storage", str(tmp_path / "runs")]
    for main, arguments, named in (
        (plain.main, ["--recipe", tiny_recipe.name, "--set", "sweeping.sweep_every=5"], "jobs/train_multitf.py"),
        (
            train_multitf.main,
            [*ray, "--set", "sweeping.sweep_every=5", "--set", "sweeping.sweep_task=nope"],
            "unknown task 'nope'",
        ),
        (
            train_multitf.main,
            [*ray, "--set", "sweeping.sweep_every=5", "--set", "sweeping.sweep_task=gsm-mini:x"],
            "--set sweeping.sweep_task=gsm-mini:x",
        ),
        (
            train_multitf.main,
            [*ray, "--set", "sweeping.sweep_every=5", "--set", "sweeping.sweep_task=gsm8k:8"],
            "gsm8k",
        ),
        (train_multitf.main, [*ray, "--set", "held_out.keep_best=sweep_accuracy"], "--set sweeping.sweep_every=N"),
        (
            plain.main,
            ["--recipe", tiny_recipe.name, "--set", "held_out.keep_best=sweep_accuracy"],
            "--set sweeping.sweep_every=N",
        ),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert named in error and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())
