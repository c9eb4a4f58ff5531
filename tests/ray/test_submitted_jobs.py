"""Jobs as they are submitted to a cluster: what they print and write, here and on S3, and their exit codes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.training.run import RECORD
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import SHIPPED
from mbd_core.evaluation.sweep.folder import REPORT, read_report
from mbd_core.files import MANIFEST
from mbd_core.multitf.recipes.by_name import RECIPES
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600.0  # seconds until a test gives up waiting for a state
WORKING_DIR = {"working_dir": str(ROOT), "excludes": [".git", ".venv", "tests", "docs"]}


@pytest.fixture(scope="module")
def client(dashboard_url: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(dashboard_url)
    submit(client, "true")  # a cluster takes jobs some seconds after it is up
    return client


def submit(client: Any, entrypoint: str, **runtime_env: Any) -> str:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env)
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def ended(client: Any, job: str) -> tuple[int | None, str]:
    """A job's exit code, once it has ended, and its log."""
    deadline = time.monotonic() + PATIENCE
    while not client.get_job_status(job).is_terminal():
        assert time.monotonic() < deadline, client.get_job_logs(job)
        time.sleep(0.2)
    return client.get_job_info(job).driver_exit_code, client.get_job_logs(job)


@pytest.mark.slow
def test_a_model_is_trained_and_swept_on_s3(
    client: Any, s3: str, s3_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base, runs = Folder.at(f"{s3}/models/tiny-bd-b8"), Folder.at(f"{s3}/runs")
    for file in (SHIPPED / "tiny-bd-b8").iterdir():
        base.filesystem()[0].put_file(str(file), f"bucket/models/tiny-bd-b8/{file.name}")
    env_vars = {**s3_server, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    train = f"python jobs/train_multitf.py --recipe tiny-bd --steps 2 --base {base} --storage {runs}"
    code, log = ended(client, submit(client, train, **WORKING_DIR, env_vars=env_vars))
    assert code == 0, log
    assert "step 2/2  loss " in log
    run = runs / "tiny-bd"
    assert f"model: {run}/model" in log
    assert len((run.read_text(LOSSES) or "").splitlines()) == 2
    records = [json.loads(run.read_text(RECORD) or ""), json.loads((run / "model").read_text("recipe.json") or "")]
    assert records[0] == records[1]
    assert records[0]["base"] == str(base)
    assert records[0]["train"]["precision"] in ("float32", "bfloat16")
    assert f" samples in {records[0]['train']['precision']}, 2 workers" in log
    assert (run / "step_000002").exists() and (run / "model").read_text(MANIFEST)
    model = Path(fetch_model(f"{run}/model"))
    assert load_model(model).config.block_size == RECIPES["tiny-bd"].states.block_size

    out = Folder.at(f"{s3}/sweeps/first")
    sweep = f"python jobs/eval_sweep.py --models {run}/model --tasks gsm-mini --limit 1 --methods single "
    sweep += f"--max-tokens 8 --timed 0 --out {out}"
    code, log = ended(client, submit(client, sweep, **WORKING_DIR, env_vars=env_vars))
    assert code == 0, log
    assert f"The report is in {out}: report.md, report.html, {REPORT}, plot.png, samples/" in log
    fetched = out.fetch(tmp_path / "reports")
    assert [row["model"] for row in read_report(fetched)["rows"]] == ["model"]
    assert sorted(path.name for path in fetched.iterdir()) == [
        *(MANIFEST, "plot.png", "report.html", "report.json", "report.md", "samples", "sweep.json"),
    ]


@pytest.mark.slow
def test_an_exit_code_says_whose_fault_it_is(client: Any, tmp_path: Path) -> None:
    """2: bad input, 1: a failure; each with one sentence in the log."""
    train, sweep = "python jobs/train_multitf.py --recipe tiny-bd", "python jobs/eval_sweep.py --tasks gsm-mini"
    endings = {
        f"{train} --storage {tmp_path} --out out": (2, "out is relative, and a submitted job runs in a copy"),
        f"{sweep} --models s3://none/x --out {tmp_path}/sweep": (2, "s3://none/x"),
        f"RAY_ADDRESS=127.0.0.1:9 {sweep} --models tiny-bd --out {tmp_path}/sweep": (1, "does not answer"),
    }
    jobs = {command: submit(client, command, **WORKING_DIR) for command in endings}
    for command, (code, sentence) in endings.items():
        found, log = ended(client, jobs[command])
        assert (found, sentence in log, "Traceback" in log) == (code, True, False), log
    assert not os.listdir(tmp_path)


def from_the_root(dashboard_url: str, submission: str, home: Path, *entrypoint: str) -> "subprocess.Popen[str]":
    """Without `--working-dir` and without `python`: the job is its path, and finds the project there."""
    command = [str(Path(sys.executable).with_name("ray")), "job", "submit", f"--address={dashboard_url}"]
    command += [f"--submission-id={submission}", "--runtime-env-json", json.dumps({"env_vars": {"HOME": str(home)}})]
    return subprocess.Popen(
        [*command, *entrypoint], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_path_of_a_job_alone_is_an_entrypoint(client: Any, dashboard_url: str, tmp_path: Path) -> None:
    job = from_the_root(dashboard_url, "no-recipe", tmp_path, "--", "jobs/train_multitf.py", "--recipe=nope")
    printed, _ = job.communicate(timeout=PATIENCE)
    assert "unknown recipe 'nope'" in printed, printed
    assert ended(client, "no-recipe")[0] == 2


@pytest.mark.slow
def test_the_line_of_the_project_s_card_trains(client: Any, dashboard_url: str, tmp_path: Path) -> None:
    job = from_the_root(dashboard_url, "card", tmp_path, "jobs/train_multitf.py")
    try:
        assert job.stdout is not None
        log = ""
        for line in job.stdout:
            log += line
            if "recipe tiny-mbd: " in line:  # from a worker, where training begins
                break
        assert f"recipe tiny-mbd: {RECIPES['tiny-mbd'].train.steps} steps of " in log, log
        assert (tmp_path / "mbd-runs" / "tiny-mbd" / RECORD).exists()
        assert client.stop_job("card")
        ended(client, "card")
    finally:
        job.kill()
        job.wait()


def test_a_job_finds_the_project_from_wherever_it_runs(tmp_path: Path) -> None:
    """Run by its path, elsewhere, where the project is not installed."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    entrypoint = [ROOT / "jobs" / "train_multitf.py", "--recipe", "nope"]
    assert os.access(entrypoint[0], os.X_OK)
    done = subprocess.run(
        [sys.executable, "-S", *entrypoint],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": packages},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, "unknown recipe 'nope'" in done.stderr) == (2, True), done.stderr
