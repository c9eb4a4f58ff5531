"""All of it on this machine (`make demo`): a short training job, a sweep, the endpoint, and a question to it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.command_line import DATA, MODEL, OUTPUT, command
from mbd_core.files import check_target_folder
from mbd_core.tasks import gsm_mini

if TYPE_CHECKING:
    from cluster.local import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
SERVE_SECONDS = 180.0

Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for all results.", rich_help_panel=OUTPUT)]
Steps = Annotated[int, typer.Option(min=1, help="Updates of the short training job.", rich_help_panel=MODEL)]
Limit = Annotated[int, typer.Option(min=1, help="Problems of the sweep.", rich_help_panel=DATA)]


def run(*, out: Out = ROOT / "out" / "demo", steps: Steps = 30, limit: Limit = 200) -> None:
    """All of it on this machine: train a little, sweep a base and its MBD, serve a model and ask it a question.

    It starts a local Ray cluster, submits a short MultiTF job and a sweep to it (ray job submit), starts the endpoint
    on it, asks one question over HTTP, and stops everything that it started. The sweep's log has its report: on
    ledger-mini MultiBD costs the base (ledger-bd) more accuracy than the model after MultiTF (ledger-mbd). A model and
    a sweep that an earlier demo left in --out are replaced.
    """
    from cluster.local import local_cluster
    from mbd_core.checkpoint.saving import MODEL_KIND
    from mbd_core.evaluation.sweep.folder import check_sweep_folder

    out, started = out.resolve(), time.perf_counter()
    check_target_folder(out / "trained", MODEL_KIND, overwrite=True)
    check_sweep_folder(out / "sweep", overwrite=True)
    print_step("1/4  a local Ray cluster")
    with local_cluster() as cluster:
        print(f"dashboard at {cluster.dashboard_url} while this runs")
        print_step("2/4  a short MultiTF post-training job")
        train(cluster, out, steps=steps)
        print_step("3/4  a base and its MBD on ledger-mini: accuracy and tokens per forward")
        sweep(cluster, out, limit=limit)
        print_step("4/4  the endpoint, asked one question")
        question = next(gsm_mini.generate(split="test", seed=0))["question"]
        with endpoint(cluster, "tiny-mbd") as url:
            ask(url, "tiny-mbd", question)
    print_step(f"done in {(time.perf_counter() - started) / 60:.1f} minutes; the cluster is stopped")
    print(f"trained model: {out / 'trained'}")
    print(f"report: {out / 'sweep' / 'report.md'}, with report.html, report.json, plot.png and samples/ beside it")


def train(cluster: LocalCluster, out: Path, *, steps: int) -> None:
    """A run of its own in `runs`, whose model replaces the earlier one in `trained`."""
    submit(
        cluster,
        *("python", "jobs/train_multitf.py", "--recipe", "ledger-mbd", "--steps", str(steps)),
        *("--storage", str(out / "runs"), "--run-name", f"demo-{time.strftime('%Y%m%d-%H%M%S')}"),
        *("--out", str(out / "trained"), "--overwrite"),
    )


def sweep(cluster: LocalCluster, out: Path, *, limit: int) -> None:
    submit(
        cluster,
        *("python", "jobs/eval_sweep.py", "--models", "ledger-bd,ledger-mbd", "--tasks", "ledger-mini"),
        *("--grid", "tau_m2t=0.8,0.9,0.95;buffer_size=2,4", "--limit", str(limit), "--timed", "4"),
        *("--out", str(out / "sweep"), "--overwrite"),
    )


def print_step(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def submit(cluster: LocalCluster, *arguments: str) -> None:
    """Run a job on the cluster and show its log as it comes; raises `RuntimeError` if it fails."""
    at = f"--address {cluster.dashboard_url}"
    print(f"$ ray job submit {at} --working-dir . -- {shlex.join(arguments)}", flush=True)
    job = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", ".", "--", *arguments]
    code = subprocess.run(job, cwd=ROOT, env=cluster.environment, check=False).returncode
    if code:
        raise RuntimeError(f"{arguments[1]} ended with exit code {code}; its log is above")


@contextmanager
def endpoint(cluster: LocalCluster, model: str) -> Iterator[str]:
    """The endpoint as a child process for as long as the block lasts; its base URL once it answers."""
    from cluster.local import free_ports

    (port,) = free_ports(1)
    command = [sys.executable, str(ROOT / "jobs" / "serve.py"), "--model", model, "--port", str(port)]
    child = subprocess.Popen(command, env=cluster.environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(child, url, deadline=time.monotonic() + SERVE_SECONDS)
        yield url
    finally:
        child.terminate()
        try:
            child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            child.kill()


def wait_until_healthy(child: subprocess.Popen[bytes], url: str, *, deadline: float) -> None:
    """Return once `/health` answers; `RuntimeError` if the endpoint ends or the deadline passes before."""
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"the endpoint ended with exit code {child.returncode}; its message is above")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise RuntimeError(f"the endpoint did not answer {url}/health within {SERVE_SECONDS:.0f} seconds")


def ask(url: str, model: str, question: str) -> None:
    """One chat completion over HTTP, question and answer printed."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]}).encode()
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    print(
        f"question: {question}\nanswer:   " + answer["choices"][0]["message"]["content"].replace("\n", "\n          ")
    )
    print(f"usage: {answer['usage']}\nmbd:   {answer['mbd']}")


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
