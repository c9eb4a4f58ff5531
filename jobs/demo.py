"""All of it on this machine: train a little, sweep the shipped models, serve one and ask it (`make demo`).

Starts a local Ray cluster, posts a short MultiTF job and a sweep to it as anybody would (`ray job submit`), starts the
endpoint on it, asks one question over HTTP, prints the table, and stops all it started.
"""

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster.local import LocalCluster, free_ports, local_cluster
from mbd_core.tasks import gsm_mini

ROOT = Path(__file__).resolve().parent.parent
SERVE_SECONDS = 180.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="where results go")
    parser.add_argument("--steps", type=int, default=30, help="training steps of the short job (default: 30)")
    parser.add_argument("--limit", type=int, default=100, help="problems a task in the sweep (default: 100)")
    return parser.parse_args(argv)


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def submit(cluster: LocalCluster, *command: str) -> None:
    """Run a job on the cluster, its log shown as it comes; raises `CalledProcessError` if it fails."""
    job = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--working-dir", ".", "--", *command]
    print(f"$ ray job submit --working-dir . -- {shlex.join(command)}", flush=True)
    subprocess.run(job, cwd=ROOT, env=cluster.environment, check=True)


@contextmanager
def endpoint(cluster: LocalCluster, model: str) -> Iterator[str]:
    """The endpoint as a child process for as long as the block lasts; its base URL once it answers."""
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


def wait_until_healthy(child: "subprocess.Popen[bytes]", url: str, *, deadline: float) -> None:
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


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    out, started = args.out.resolve(), time.perf_counter()
    say("1/4  a local Ray cluster")
    with local_cluster() as cluster:
        print(f"dashboard at {cluster.dashboard_url} while this runs")
        say("2/4  a short MultiTF post-training job")
        train = ["python", "jobs/train_multitf.py", "--recipe", "tiny-mbd", "--steps", str(args.steps)]
        run = f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        submit(cluster, *train, "--storage", str(out / "runs"), "--run-name", run, "--out", str(out / "trained"))
        say("3/4  the two shipped models, swept on both tasks")
        sweep = ["python", "jobs/eval_sweep.py", "--models", "tiny-bd,tiny-mbd", "--tasks", "gsm-mini,code-mini"]
        grid = ["--grid", "tau_m2t=0.7,0.9;buffer_size=4", "--limit", str(args.limit), "--overwrite"]
        submit(cluster, *sweep, *grid, "--out", str(out / "sweep"))
        say("4/4  the endpoint, asked one question")
        question = next(gsm_mini.generate(split="test", seed=0))["question"]
        with endpoint(cluster, "tiny-mbd") as url:
            ask(url, "tiny-mbd", question)
    say(f"done in {(time.perf_counter() - started) / 60:.1f} minutes; the cluster is stopped")
    print((out / "sweep" / "report.md").read_text())
    print(f"trained model: {out / 'trained'}")
    print(f"report: {out / 'sweep' / 'report.md'}, with report.json, plot.png and samples/ beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
