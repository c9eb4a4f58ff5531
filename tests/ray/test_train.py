"""Training on Ray: the plain trainer's run on two workers, whatever happens to them on the way."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError
from ray.train import ControllerError, WorkerGroupError

from actors.training import worker as training
from actors.training.run import TrainingRun, begin
from actors.training.sweeps import RaySweeper, sweep_checkpoint
from actors.training.worker import fit
from cluster import local
from jobs import train_multitf
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.multitf.config import Sweeping
from mbd_core.multitf.run.beginning import prepare
from mbd_core.multitf.run.checkpoints import MARKER
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.multitf.run.start import StartingPoint
from mbd_core.multitf.step.trainer import Diverged, Trainer
from mbd_core.storage.folder import Folder

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 600.0  # seconds until a test gives up waiting for a state


def start(recipe, path: Path, name: str, **settings) -> TrainingRun:
    storage = Folder.at(path)
    settings = {"out": storage / name / "model"} | settings
    run = TrainingRun(recipe=recipe, name=name, storage=storage, **settings)
    begin(run, resume=False)
    return run


def curve(run: TrainingRun) -> list[tuple[int, float]]:
    points = [json.loads(line) for line in run.folder.read_text(LOSSES).splitlines()]
    return [(p["step"], p["loss"]) for p in points]


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, tiny_recipe, tiny_model_dir, tmp_path_factory) -> TrainingRun:
    """A run whose model takes the place of another one, which has no `recipe.json`."""
    folder = tmp_path_factory.mktemp("runs")
    out = Folder.at(shutil.copytree(tiny_model_dir, folder / "model"))
    run = start(tiny_recipe, folder, "undisturbed", checkpoint_every=100, out=out, overwrite=True)
    assert fit(run) == 0
    return run


def test_two_workers_train_what_one_process_trains(undisturbed, tiny_recipe):
    model, _, examples = prepare(StartingPoint.read(tiny_recipe))
    trainer = Trainer(model, examples, tiny_recipe.states, tiny_recipe.train)
    alone = [(m.step, m.loss) for m in (trainer.step() for _ in range(tiny_recipe.train.steps))]
    together = curve(undisturbed)
    assert [s for s, _ in together] == [s for s, _ in alone]
    assert [loss for _, loss in together] == pytest.approx([loss for _, loss in alone], rel=1e-3)
    written = load_model(undisturbed.out.path, dtype=torch.float32)
    load_tokenizer(undisturbed.out.path, written.config)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(written.state_dict()[name], tensor, rtol=1e-2, atol=5e-3)  # written in bfloat16
    differences = [(written.state_dict()[n] - t.bfloat16()).abs().flatten() for n, t in model.state_dict().items()]
    assert float(torch.cat(differences).mean()) < 2e-5, "the last update alone moves a weight by 1.4e-4"


def test_a_run_that_diverged_is_not_begun_again(ray_cluster, tiny_recipe, tmp_path):
    run = start(replace(tiny_recipe, train=replace(tiny_recipe.train, lr=1e8, warmup=0)), tmp_path, "diverged")
    assert run.max_failures > 0
    with pytest.raises(Diverged, match=r"update \d+ has gradients that are not finite.* lower learning rate than 1e"):
        fit(run)
    assert not run.out.exists()


@pytest.mark.slow
def test_sweeps_beside_a_run_have_the_numbers_of_its_checkpoints(ray_cluster, tiny_recipe, tmp_path, monkeypatch):
    sweeping = Sweeping(sweep_every=6, sweep_task="gsm-mini:2")
    run = start(tiny_recipe, tmp_path, "swept", checkpoint_every=100, sweeping=sweeping)
    assert fit(run) == 0
    lines = [json.loads(line) for line in run.folder.read_text(LOSSES).splitlines()]
    numbers = {line["step"] + 1: {n: v for n, v in line.items() if n.startswith("sweep_")} for line in lines}
    assert [step for step, values in numbers.items() if values] == [6, 12]
    for step in (6, 12):
        assert numbers[step] == sweep_checkpoint(run, step, on_gpu=False)
    sweeper = RaySweeper(run)
    error = sweeper.begin(99).exception(PATIENCE)
    assert error is not None and "step_000099" in sweeper.reason(error) and "\n" not in sweeper.reason(error)
    sweep = sweeper.begin(12)
    sweeper.end()
    error = sweep.exception(PATIENCE)
    assert error is not None and "\n" not in sweeper.reason(error)
    monkeypatch.setattr("ray.available_resources", dict)
    with pytest.raises(RuntimeError, match="no free CPU"):
        sweeper.begin(12)


class HeldCheckpoint:
    """The checkpoint of one step, which a run begins to write and cannot finish before `kill_a_worker`.

    Where its file should lie there is a named pipe that nobody reads, so opening it for writing waits.
    """

    def __init__(self, run: TrainingRun, step: int) -> None:
        self.run, self.step = run, step
        folder = run.folder.path / f"step_{step:06d}"
        folder.mkdir()
        self.pipe = folder / "__0_0.distcp"  # the first worker's part
        os.mkfifo(self.pipe)

    def kill_a_worker(self) -> None:
        """SIGKILL one of two training processes once this step is done and the checkpoint before it is whole."""
        import ray
        from ray.util.state import list_actors

        address = ray.get_runtime_context().gcs_address  # other clusters may run on this machine

        def workers() -> list[Any]:
            living = [("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")]
            return list_actors(address, filters=living, timeout=60)

        try:
            wait_until(lambda: len((self.run.folder.read_text(LOSSES) or "").splitlines()) >= self.step)
            wait_until(lambda: (self.run.folder.path / f"step_{self.step - 1:06d}" / MARKER).exists())
            wait_until(lambda: len(workers()) == 2)
            os.kill(workers()[-1].pid, signal.SIGKILL)
        finally:
            self.release()

    def release(self) -> None:
        """Let a write that still waits fail, and a later start write a plain file."""
        os.close(os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK))
        self.pipe.unlink(missing_ok=True)  # a resumption may have removed it with its folder


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, "the awaited state was not reached"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "max_failures", [pytest.param(1, id="worker-killed"), pytest.param(0, id="run-lost-then-resumed")]
)
def test_a_killed_worker_costs_time_and_nothing_else(undisturbed, tiny_recipe, tmp_path, max_failures):
    from ray.train import TrainingFailedError

    run = start(tiny_recipe, tmp_path, "disturbed", checkpoint_every=1, max_failures=max_failures)
    held = HeldCheckpoint(run, step=3)
    with ThreadPoolExecutor() as threads:
        killer = threads.submit(held.kill_a_worker)
        if max_failures:
            resumed_after = fit(run)
        else:
            with pytest.raises(TrainingFailedError):
                fit(run)
            assert not run.out.exists()
            begin(run, resume=True)
            resumed_after = fit(run)
        killer.result()
    assert resumed_after == 2
    assert curve(run) == curve(undisturbed)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--recipe", "nope"], "tiny-bd"),
        (["--recipe", "tiny-bd", "--steps", "0"], "--steps"),
        (["--recipe", "tiny-bd", "--workers", "7"], "does not divide over 7 workers"),
        (
            ["--recipe", "tiny-bd", "--base", "nowhere"],
            "known name; known: "
            "ledger-bd, ledger-mbd, ledger-opd, ledger-tf, smollm2-135m, smollm2-ar, smollm2-bd, smollm2-mbd, tiny-bd",
        ),
        (["--recipe", "tiny-bd", "--resume", "--storage", "."], "there is no run"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "connect", lambda **_: pytest.fail("no cluster is needed for it"))
    assert train_multitf.main(arguments) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert len(printed.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_a_folder_of_the_users_is_refused_before_anything_begins(options, tmp_path, capsys, monkeypatch):
    import ray

    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("training must not begin")

    monkeypatch.setattr(ray, "init", fail)
    out, storage = tmp_path / "mine", tmp_path / "runs"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    arguments = ["--recipe", "tiny-mbd", "--steps", "1", "--out", str(out), "--storage", str(storage), *options]
    assert train_multitf.main(arguments) == 2
    assert f"{out} exists already" in capsys.readouterr().err
    assert not storage.exists()
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    assert (out / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("option", ["--storage", "--out"])
def test_a_target_that_cannot_be_written_is_told_before_a_cluster_starts(
    option: str, s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "connect", lambda **_: pytest.fail("no cluster is needed for it"))
    (tmp_path / "file").write_text("")
    command = ["--recipe", "tiny-mbd", "--storage", str(tmp_path / "runs")]
    for target, sentence in (
        ("s3://none-such/x", "cannot be written: The specified bucket does not exist"),
        ("s4://bucket/x", "cannot be reached: unknown scheme 's4'; give a path, or a URL as s3://..."),
        (f"{tmp_path}/file/x", f"cannot be written: {tmp_path}/file: Not a directory"),
    ):
        assert train_multitf.main([*command, option, target]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"train_multitf: {target}")
        assert sentence in error
        assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_model_of_an_earlier_run_is_replaced_only_on_demand(undisturbed, tiny_recipe, tiny_model_dir, tmp_path):
    run = TrainingRun(
        recipe=tiny_recipe, name="again", storage=Folder.at(tmp_path), out=undisturbed.out, checkpoint_every=100
    )
    with pytest.raises(ValueError, match=r"holds a model; give another folder, or --overwrite"):
        begin(run, resume=False)
    assert not run.folder.exists()
    assert not (tiny_model_dir / "recipe.json").exists(), "the model that was replaced is told from the run's"
    assert json.loads((undisturbed.out.path / "recipe.json").read_text())["train"]["steps"] == tiny_recipe.train.steps


def failing_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], storage: Path, *, stage: str, error: Exception
) -> str:
    """The one line on stderr of a job, on the tests' cluster, whose `connect` or `fit` fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(local, "connect", fail if stage == "connect" else lambda **_: False)
    monkeypatch.setattr(training, "plan_run", lambda run, start: run)
    monkeypatch.setattr(training, "fit", fail)
    assert train_multitf.main(["--recipe", "tiny-mbd", "--steps", "1", "--storage", str(storage)]) == 1
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    return printed


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            WorkerGroupError("two ranks", {1: ValueError("late"), 0: OSError("Traceback\n  File x\nno space\n")}),
            "no space",
        ),
        (ControllerError(RuntimeError("no controller")), "no controller"),
        (ActorDiedError(), "The actor died unexpectedly before finishing this task."),
    ],
    ids=["worker", "controller", "actor"],
)
def test_a_training_that_fails_is_one_sentence_and_its_traceback_a_file(
    error: Exception, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "tiny-mbd"
    assert failing_job(monkeypatch, capsys, tmp_path, stage="fit", error=error) == (
        f"train_multitf: the training failed: {reason}; the run lies in {run}; go on with the same command and "
        "--resume; the traceback is in failure.txt there\n"
    )
    traceback = (run / "failure.txt").read_text()
    assert traceback.startswith("Traceback")
    assert str(error) in traceback


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_that_diverged_is_one_sentence_that_asks_for_no_resumption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error, run = Diverged("update 2 has gradients that are not finite"), tmp_path / "tiny-mbd"
    assert failing_job(monkeypatch, capsys, tmp_path, stage="fit", error=error) == (
        f"train_multitf: the training failed: {error}; the run lies in {run}\n"
    )
    assert str(error) in (run / "failure.txt").read_text()


def test_a_cluster_that_does_not_start_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("the local Ray cluster did not start within 300 s")
    for _ in range(2):  # the same command can be repeated
        assert failing_job(monkeypatch, capsys, tmp_path, stage="connect", error=error) == f"train_multitf: {error}\n"
        assert not list(tmp_path.iterdir())


def test_more_workers_than_the_cluster_has_room_for_leave_nothing_behind(
    ray_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tests' cluster has 8 CPUs and no GPU."""
    command = ["--recipe", "tiny-mbd", "--storage", str(tmp_path)]
    assert train_multitf.main([*command, "--workers", "12"]) == 2
    assert train_multitf.main([*command, "--device", "gpu"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "train_multitf: 12 workers need 1 CPU each; the cluster's nodes have 8 CPUs; ask for fewer",
        "train_multitf: 2 workers need 1 GPU and 1 CPU each; the cluster's nodes have 0 GPUs and 8 CPUs; ask for "
        "fewer",
    ]
    assert not list(tmp_path.iterdir())
