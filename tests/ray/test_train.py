"""Training on Ray: the plain trainer's run on two workers, whatever happens to them on the way."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.training import TrainingResult, fit
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.tokenizer_files import load_tokenizer
from mbd_core.multitf.preparation import prepare
from mbd_core.multitf.recipes import RECIPES, shortened
from mbd_core.multitf.trainer import Trainer
from mbd_core.multitf.training_run import LOSSES, RECORD, TrainingRun, begin

ROOT = Path(__file__).resolve().parent.parent.parent


def start(recipe, storage: Path, name: str, **settings) -> TrainingRun:
    run = TrainingRun(recipe=recipe, name=name, storage=storage, out=storage / name / "model", **settings)
    begin(run, resume=False)
    return run


def curve(run: TrainingRun) -> list[tuple[int, float]]:
    points = [json.loads(line) for line in (run.folder / LOSSES).read_text().splitlines()]
    return [(p["step"], p["loss"]) for p in points]


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, tiny_recipe, tmp_path_factory) -> TrainingRun:
    run = start(tiny_recipe, tmp_path_factory.mktemp("runs"), "undisturbed", checkpoint_every=100)
    assert fit(run) == TrainingResult(model=run.out, resumed_after=0)
    return run


def test_two_workers_train_what_one_process_trains(undisturbed, tiny_recipe):
    model, _, examples = prepare(tiny_recipe)
    trainer = Trainer(model, examples, tiny_recipe.states, tiny_recipe.train)
    alone = [(m.step, m.loss) for m in (trainer.step() for _ in range(tiny_recipe.train.steps))]
    together = curve(undisturbed)
    assert [s for s, _ in together] == [s for s, _ in alone]
    assert [loss for _, loss in together] == pytest.approx([loss for _, loss in alone], rel=1e-3)
    written = load_model(undisturbed.out, dtype=torch.float32)
    load_tokenizer(undisturbed.out, written.config)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(written.state_dict()[name], tensor, rtol=1e-2, atol=5e-3)  # written in bfloat16


def kill_a_worker_after(checkpoint: Path, killed: list[int]) -> None:
    """SIGKILL one training process once `checkpoint` is there."""
    from ray.util.state import list_actors

    deadline = time.monotonic() + 60
    workers: list[Any] = []
    while not workers and time.monotonic() < deadline:  # asking takes long, so ask before the moment has come
        workers = list_actors(filters=[("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")])
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(workers[-1].pid, signal.SIGKILL)
    killed.append(workers[-1].pid)


@pytest.mark.parametrize("max_failures", [1, 0], ids=["worker-killed", "run-lost-then-resumed"])
def test_a_killed_worker_costs_time_and_nothing_else(undisturbed, tiny_recipe, tmp_path, max_failures):
    from ray.train import TrainingFailedError

    run = start(tiny_recipe, tmp_path, "disturbed", checkpoint_every=1, max_failures=max_failures)
    killed: list[int] = []
    killer = threading.Thread(target=kill_a_worker_after, args=(run.folder / "step_000003", killed))
    killer.start()
    if max_failures:
        result = fit(run)
    else:
        with pytest.raises(TrainingFailedError):
            fit(run)
        assert not run.out.exists()
        begin(run, resume=True)
        result = fit(run)
    killer.join()
    assert len(killed) == 1
    # While step 3 is being written, Ray may not have recorded step 2 yet; step 1 it has, or 2 could not be reported.
    assert result.resumed_after >= 1
    assert curve(run) == curve(undisturbed)


@pytest.mark.slow
def test_a_submitted_job_shows_its_loss_and_writes_a_model(dashboard_url, tmp_path):
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(dashboard_url)
    deadline = time.monotonic() + 180
    job = None
    while job is None:
        try:
            job = client.submit_job(
                entrypoint=f"python jobs/train_multitf.py --recipe tiny-bd --steps 2 --storage {tmp_path}",
                runtime_env={"working_dir": str(ROOT), "excludes": [".git", ".venv"]},
            )
        except RuntimeError as error:  # a cluster takes jobs some seconds after it is up
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1.0)
    while not client.get_job_status(job).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.5)
    log = client.get_job_logs(job)
    assert client.get_job_status(job) == JobStatus.SUCCEEDED, log
    assert "step 2/2  loss " in log
    assert load_model(tmp_path / "tiny-bd" / "model").config.block_size == RECIPES["tiny-bd"].states.block_size


def test_a_shortened_recipe_takes_only_the_samples_it_consumes(tiny_recipe):
    full = RECIPES["tiny-bd-b8"]
    short = shortened(replace(full, base="somewhere"), 35)
    assert short.data.per_task * 2 == 35 * full.train.batch_size
    assert short.train.steps == 35 and short.train.warmup == round(full.train.warmup * 35 / full.train.steps)
    assert shortened(full, full.train.steps).data == full.data
    assert shortened(full, 1).data.per_task == 4000


def test_a_run_is_begun_once_and_resumed_as_itself(tiny_recipe, tmp_path):
    run = start(tiny_recipe, tmp_path, "mine")
    with pytest.raises(ValueError, match="--resume"):
        begin(run, resume=False)
    begin(run, resume=True)
    other = replace(run, recipe=replace(tiny_recipe, max_length=300))
    with pytest.raises(ValueError, match=RECORD):
        begin(other, resume=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "nope"], "tiny-bd"),
        (["--recipe", "tiny-bd", "--steps", "0"], "at least 1"),
        (["--recipe", "tiny-bd", "--workers", "7"], "does not divide over 7 workers"),
        (["--recipe", "tiny-bd", "--base", "nowhere"], "nowhere is not a model folder"),
        (["--recipe", "tiny-bd", "--resume", "--storage", "."], "there is no run"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, said, tmp_path):
    command = [sys.executable, str(ROOT / "jobs" / "train_multitf.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
