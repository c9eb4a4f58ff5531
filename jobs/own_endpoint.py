"""An endpoint of our own for a measurement: `jobs/serve.py` as a child process, on a Ray that ends with it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.local import free_ports

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS, STOP_SECONDS = 300.0, 120.0


@dataclass(frozen=True, kw_only=True)
class OwnEndpoint:
    """A running endpoint; all its processes are descendants of `process`."""

    url: str
    process: psutil.Process


@contextmanager
def own_endpoint(options: Sequence[str], *, log: Path) -> Iterator[OwnEndpoint]:
    """`jobs/serve.py` with these options on a free port, for as long as the block lasts; its output goes to `log`.

    It runs on a Ray of its own, also where RAY_ADDRESS is set. Raises `RuntimeError` with the last line of its output
    if it does not serve, with all its replicas, within `START_SECONDS`.
    """
    (port,) = free_ports(1)
    command = [sys.executable, str(ROOT / "jobs" / "serve.py"), *options, "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    process = psutil.Process(child.pid)
    try:
        _wait_until_served(child, log)
        yield OwnEndpoint(url=f"http://127.0.0.1:{port}", process=process)
    finally:
        _stop(child, process)


def _wait_until_served(child: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until the job says so, which it does when all replicas are there; /health answers with the first."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        lines = log.read_text().splitlines()
        if any(line.startswith("serving ") for line in lines):
            return
        if child.poll() is not None or time.monotonic() > deadline:
            said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            raise RuntimeError(f"the endpoint did not start: {said}")
        time.sleep(0.2)


def _stop(child: "subprocess.Popen[bytes]", process: psutil.Process) -> None:
    """End it by one signal, and kill what is left of it, at the latest after the time limit."""
    descendants = process.children(recursive=True) if child.poll() is None else []
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=STOP_SECONDS)
    for left in descendants:
        with suppress(psutil.Error):
            left.kill()
    child.kill()
    child.wait()
