"""jobs/serve.py ends: the first signal lets the requests under way end whole, on every replica, and refuses others."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from actors.serving.proxy import MAX_LENGTH
from cluster.local import RAY_START, TOKEN_PATH, free_ports, local_cluster

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300  # seconds for what ends by itself, however busy the machine is
MODEL, REPLICAS, STREAMS = "tiny", 2, 4
CHOICES = 4  # of a stream: so many that none has ended when the last one begins, on a busy machine too


def entrypoint(model: Path, port: int) -> list[str]:
    """Replicas that decode one sequence at a time."""
    engine = ["--max-rows", "1", "--num-pages", "64", "--drain-seconds", str(LIMIT)]
    served = ["--model", str(model), "--name", MODEL, "--port", str(port), "--replicas", str(REPLICAS)]
    return ["jobs/serve.py", *served, *engine]


@contextmanager
def serve_job(model: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """The job, on a Ray of its own; none of its processes outlives the block."""
    command = [sys.executable, *entrypoint(model, port)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        started = psutil.Process(job.pid)
        children: list[psutil.Process] = []
        try:
            yield job
        finally:
            if job.poll() is None:
                children = started.children(recursive=True)
                job.kill()
            for process in children:
                if process.is_running():
                    process.kill()


def wait_until_served(url: str, job: subprocess.Popen[str]) -> None:
    """Until the job has said so: the first replica answers before all are there."""
    assert job.stdout is not None
    assert f"serving {MODEL} at {url}/v1\n" in iter(job.stdout.readline, ""), "the job ended before it served"


def stream(url: str, seed: int, begun: threading.Semaphore) -> list[str]:
    """The events of a request of long answers, one token a forward; `begun` is released with the first."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tom has {seed} pens."}],
        "stream": True,
        "n": CHOICES,
        "max_tokens": 300,
        "temperature": 1,
        "seed": seed,
        "decoding": {"buffer_size": 1, "tau_m2t": 1.0},
    }
    lines: list[str] = []
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT) as response:
            for line in filter(None, response.iter_lines()):
                if not lines:
                    begun.release()
                lines.append(line)
    except httpx.HTTPError as error:
        lines.append(f"cut: {error}")
    return lines


def check_whole(lines: list[str]) -> None:
    assert lines[-1] == "data: [DONE]", lines[-1]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"] in ("stop", "length")]
    assert sorted(ended) == list(range(CHOICES))


def check_refusing(url: str) -> None:
    """New requests get 503, whichever replica they reach, and /health says why."""
    deadline = time.monotonic() + LIMIT
    while (state := httpx.get(f"{url}/health", timeout=LIMIT)).status_code == 200:
        assert time.monotonic() < deadline, "the signal has no effect"
        time.sleep(0.02)
    assert state.status_code == 503
    assert (state.json()["ready"], state.json()["draining"]) == (False, True)
    for _ in range(3 * REPLICAS):
        refused = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x"}, timeout=LIMIT)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        error = refused.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("server_error", "shutting_down", None)


@pytest.mark.slow
def test_streams_end_whole_after_a_signal(tiny_model_dir: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with serve_job(tiny_model_dir, port) as job, ThreadPoolExecutor(STREAMS) as pool:
        wait_until_served(url, job)
        named = httpx.get(f"{url}/health", headers={"X-Request-ID": "x" * 20_000}, timeout=LIMIT)
        assert named.headers["x-request-id"] == "x" * MAX_LENGTH
        begun = threading.Semaphore(0)
        streams = [pool.submit(stream, url, seed, begun) for seed in range(STREAMS)]
        for _ in streams:
            assert begun.acquire(timeout=LIMIT)
        processes = psutil.Process(job.pid).children(recursive=True)
        assert len(processes) > REPLICAS
        job.send_signal(signal.SIGTERM)
        check_refusing(url)
        assert any(not one.done() for one in streams), "the streams were too short to tell anything"
        for one in streams:
            check_whole(one.result())
        printed = job.communicate(timeout=LIMIT)[0].splitlines()
        assert job.returncode == 0
        drain = re.compile(rf"draining [1-{STREAMS}] requests?, at most {LIMIT} s; a second signal stops at once")
        (at,) = [number for number, line in enumerate(printed) if drain.fullmatch(line)]
        assert printed[at + 1 :] == ["stopping"], "the end is quiet"
        assert not psutil.wait_procs(processes, timeout=LIMIT)[1], "processes outlived the job"


@pytest.mark.slow
def test_streams_of_a_submitted_job_end_whole_when_it_is_stopped(tiny_model_dir: Path) -> None:
    """The job is given the time of its drain, and stopped by the request that `ray job stop` makes."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    patience = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(LIMIT)}})

    def ray_job(verb: str, *arguments: str) -> str:
        command = [*RAY_START[:-1], "job", verb, f"--address={cluster.dashboard_url}", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=LIMIT, check=True
        )
        return done.stdout

    with local_cluster(num_cpus=8) as cluster, ThreadPoolExecutor(STREAMS) as pool:
        submission = ["--submission-id=served", "--no-wait", "--runtime-env-json", patience]
        ray_job("submit", *submission, "--", "python", *entrypoint(tiny_model_dir, port))
        deadline = time.monotonic() + LIMIT
        while f"serving {MODEL} at " not in (log := ray_job("logs", "served")):
            assert time.monotonic() < deadline, log
            time.sleep(1)
        token = {"Authorization": f"Bearer {Path(cluster.environment[TOKEN_PATH]).read_text()}"}
        begun = threading.Semaphore(0)
        streams = [pool.submit(stream, url, seed, begun) for seed in range(STREAMS)]
        for _ in streams:
            assert begun.acquire(timeout=LIMIT)
        job = f"{cluster.dashboard_url}/api/jobs/served"
        stopped = httpx.post(f"{job}/stop", headers=token, timeout=LIMIT)
        assert stopped.json() == {"stopped": True}, stopped.text
        check_refusing(url)
        assert any(not one.done() for one in streams), "the streams were too short to tell anything"
        for one in streams:
            check_whole(one.result())
        while (state := httpx.get(job, headers=token, timeout=LIMIT).json()["status"]) != "STOPPED":
            assert time.monotonic() < deadline + LIMIT, state
            time.sleep(1)
        assert "\nstopping\n" in ray_job("logs", "served")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=LIMIT)
