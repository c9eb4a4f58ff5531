"""A Ray cluster on this machine: started as a child process and stopped again, or simply connected to."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = "127.0.0.1"
START_SECONDS = 300.0
GCS_SECONDS = "RAY_gcs_server_port_wait_time_s"  # how long Ray waits for its first process, the GCS
OBJECT_STORE_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class LocalCluster:
    """A running cluster; a child process given `environment` finds it (`ray job submit`, `ray.init()`)."""

    dashboard_url: str
    environment: dict[str, str]
    log: Path


@contextmanager
def local_cluster(*, num_cpus: int = 8, start_seconds: float = START_SECONDS) -> Iterator[LocalCluster]:
    """A one-node cluster of `num_cpus` logical CPUs for as long as the block lasts; other clusters are left alone.

    Ray's ports other than the dashboard's listen on every interface, so the cluster asks for a token of its own, which
    only this user can read. Raises `RuntimeError`, one sentence with the last line of Ray's log, if the cluster takes
    no jobs within `start_seconds`. None of its processes outlives the block.
    """
    # Ray's socket paths must stay under 107 bytes: a short folder, wherever TMPDIR points.
    folder = Path(tempfile.mkdtemp(prefix="mbd-", dir="/tmp"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    port, dashboard_port, agent_port, client_port = free_ports(4)
    cluster = LocalCluster(
        dashboard_url=f"http://{LOOPBACK}:{dashboard_port}",
        environment={
            **os.environ,
            "RAY_ADDRESS": f"{LOOPBACK}:{port}",
            "RAY_API_SERVER_ADDRESS": f"http://{LOOPBACK}:{dashboard_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            GCS_SECONDS: f"{start_seconds:.0f}",
            "PYTHONPATH": _with_root(os.environ.get("PYTHONPATH")),
            # A submitted job says `python`: it must be the one that runs here.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        },
        log=folder / "head.log",
    )
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--log-color=false"),
        *(f"--node-ip-address={LOOPBACK}", f"--port={port}"),
        *(f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard_port}"),
        # By default every cluster of a machine takes the same two ports; the second then takes no jobs.
        *(f"--dashboard-agent-listen-port={agent_port}", f"--ray-client-server-port={client_port}"),
        *(f"--num-cpus={num_cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder}"),
    ]
    environment = {k: v for k, v in cluster.environment.items() if k not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    with cluster.log.open("w") as log:
        head = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
    try:
        _wait_until_up(head, cluster, seconds=start_seconds)
        yield cluster
    finally:
        _stop(head)
        shutil.rmtree(folder, ignore_errors=True)


def connect(*, num_cpus: int = 4, worker_logs: bool = True, start_seconds: float = START_SECONDS) -> bool:
    """Join the cluster at `RAY_ADDRESS` (set inside a submitted job); without it, start one that ends with us.

    `worker_logs` shows what workers print. Returns whether there is now a connection to end with `ray.shutdown()`,
    which is not so for a caller who was connected before. Raises `RuntimeError`, one sentence, if no cluster answers.
    """
    if ray.is_initialized():
        return False
    log_settings = {"logging_level": "info" if worker_logs else "warning", "log_to_driver": worker_logs}
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        start_ray(start_seconds=start_seconds, num_cpus=num_cpus, **log_settings)
        return True
    try:
        ray.init(**log_settings)
    except ConnectionError as error:
        raise RuntimeError(f"the Ray cluster at RAY_ADDRESS={address} does not answer: {_one_line(error)}") from error
    return True


def start_ray(*, start_seconds: float = START_SECONDS, **settings: Any) -> None:
    """Start a cluster that ends with this process, by `ray.init` with `settings`, and connect to it.

    Raises `RuntimeError`, one sentence, if it does not start. Ray waits `start_seconds` for its first process, the
    GCS, and for the node's own process half a minute, which cannot be set.
    """
    os.environ[GCS_SECONDS] = f"{start_seconds:.0f}"
    os.environ["PYTHONPATH"] = _with_root(os.environ.get("PYTHONPATH"))
    try:
        ray.init("local", object_store_memory=OBJECT_STORE_BYTES, **settings)
    except ValueError:  # a wrong setting
        raise
    except Exception as error:  # Ray has no narrower type for a start that fails
        ray.shutdown()
        raise RuntimeError(f"no Ray cluster could be started on this machine: {_one_line(error)}") from error


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports nobody listens on at this moment."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind((LOOPBACK, 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _with_root(path: str | None) -> str:
    return os.pathsep.join(filter(None, [str(ROOT), path]))


def _wait_until_up(head: subprocess.Popen[bytes], cluster: LocalCluster, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    # The dashboard answers some seconds before the cluster takes jobs, so it is up when it has taken an empty one.
    request = urllib.request.Request(f"{cluster.dashboard_url}/api/jobs/", data=b'{"entrypoint": "true"}')
    request.add_header("Authorization", f"Bearer {Path(cluster.environment['RAY_AUTH_TOKEN_PATH']).read_text()}")
    request.add_header("Content-Type", "application/json")
    # Each request submits a job, which takes long on a busy machine: none is given up before the deadline.
    while head.poll() is None and (left := deadline - time.monotonic()) > 0:
        try:
            with urllib.request.urlopen(request, timeout=left):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.3)
    reason = f"took no job within {seconds:g} s" if head.poll() is None else f"ended with exit code {head.returncode}"
    lines = [line.strip() for line in cluster.log.read_text().splitlines() if line.strip()]
    raise RuntimeError(f"the local Ray cluster {reason}; its log ends: {lines[-1] if lines else '(it is empty)'}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _stop(head: subprocess.Popen[bytes]) -> None:
    """End the head, and what is left of its process group, which holds nothing that it did not start."""
    head.terminate()
    with suppress(subprocess.TimeoutExpired):
        head.wait(timeout=30)
    with suppress(ProcessLookupError):
        os.killpg(head.pid, signal.SIGKILL)
    head.wait()
