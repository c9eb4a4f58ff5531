"""An endpoint of our own for a measurement: `jobs/serve.py` in processes that end with ours, on a Ray of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS, STOP_SECONDS = 300.0, 120.0


@dataclass(frozen=True, kw_only=True)
class OwnEndpoint:
    """A running endpoint; `process` supervises it, and all its processes are descendants of that one."""

    url: str
    process: psutil.Process


@contextmanager
def own_endpoint(options: Sequence[str], *, log: Path) -> Iterator[OwnEndpoint]:
    """`jobs/serve.py` with these options on a free port, for as long as the block lasts; its output goes to `log`.

    It runs on a Ray of its own, also where RAY_ADDRESS is set, and ends with this process, however that ends; the
    folder of `log` is then removed. Raises `RuntimeError` with the last line of its output
    if it does not serve, with all its replicas, within `START_SECONDS`.
    """
    from cluster.local import SUPERVISOR, free_ports

    (port,) = free_ports(1)
    command = [sys.executable, "-P", str(SUPERVISOR), str(os.getpid()), str(log.parent)]
    command += [sys.executable, str(ROOT / "jobs" / "serve.py"), *options, "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as output:
        supervisor = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    process = psutil.Process(supervisor.pid)
    try:
        _wait_until_served(supervisor, log)
        yield OwnEndpoint(url=f"http://127.0.0.1:{port}", process=process)
    finally:
        _stop(supervisor, process)


def _wait_until_served(supervisor: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until the job says so, which it does when all replicas are there; /health answers with the first."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        lines = log.read_text().splitlines()
        if any(line.startswith("serving ") for line in lines):
            return
        if supervisor.poll() is not None or time.monotonic() > deadline:
            said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            raise RuntimeError(f"the endpoint did not start: {said}")
        time.sleep(0.2)


def _stop(supervisor: "subprocess.Popen[bytes]", process: psutil.Process) -> None:
    """Let the job clear away; its supervisor then ends too, and after the time limit it kills what is left."""
    if supervisor.poll() is None:
        for job in process.children():
            with suppress(psutil.Error):
                job.terminate()
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(timeout=STOP_SECONDS)
    supervisor.terminate()
    supervisor.wait()
