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
from jobs.demo import wait_until_healthy

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS, STOP_SECONDS = 300.0, 120.0


@dataclass(frozen=True, kw_only=True)
class OwnEndpoint:
    """A running endpoint; all its processes are descendants of `process`."""

    url: str
    process: psutil.Process

    def actors(self, kind: str) -> list[psutil.Process]:
        """The Ray processes whose title holds `kind`, such as `ServeReplica`."""
        found = []
        for process in self.process.children(recursive=True):
            with suppress(psutil.Error):
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::") and kind in process.cmdline()[0]:
                    found.append(process)
        return found


@contextmanager
def own_endpoint(options: Sequence[str], *, log: Path) -> Iterator[OwnEndpoint]:
    """`jobs/serve.py` with these options on a free port, for as long as the block lasts; its output goes to `log`.

    It runs on a Ray of its own, also where RAY_ADDRESS is set. Raises `RuntimeError` with the last line of its output
    if it does not answer.
    """
    (port,) = free_ports(1)
    command = [sys.executable, str(ROOT / "jobs" / "serve.py"), *options, "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    process = psutil.Process(child.pid)
    try:
        try:
            wait_until_healthy(child, url, deadline=time.monotonic() + START_SECONDS)
        except RuntimeError as error:
            lines = log.read_text().strip().splitlines()
            raise RuntimeError(f"the endpoint did not start: {lines[-1] if lines else error}") from error
        yield OwnEndpoint(url=url, process=process)
    finally:
        _stop(child, process)


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
