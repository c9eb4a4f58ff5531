"""A Ray cluster on this machine: started in processes of its own and ended with ours, or simply connected to.

Of the workers' lines only their standard output is printed. `ray_lines` keeps their other lines, and Ray's own, for a
failure.
"""

import atexit
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from cluster.ray_private import (
    SEVERAL_NODES,
    WORKERS_BY_UV,
    cluster_addresses,
    forget_token,
    handle_worker_lines,
    make_token,
    on_loopback,
    starts_workers_by_uv,
)
from mbd_core.proxies import keep_direct

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = "127.0.0.1"
START_SECONDS = 300.0
ANSWER_SECONDS = 30.0
ALIVE_SECONDS, ALIVE_LOG_SECONDS = 3.0, 15.0  # until a long wait is shown; between its lines in a log
KEPT_LINES = 500
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
AUTH_MODE = "RAY_AUTH_MODE"
SUPERVISOR = Path(__file__).with_name("supervisor.py")
RAY_START = (sys.executable, "-P", "-m", "ray.scripts.scripts", "start")
ASK = "import sys; from ray.scripts.scripts import cli; print(flush=True); cli(['status', sys.argv[1]])"
GCS_SECONDS = "RAY_gcs_server_port_wait_time_s"  # how long Ray waits for its first process, the GCS
SESSION_PLACES = ("/tmp", "/var/tmp")
MOST_BYTES = 40  # of the path of a folder for temporary files
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

    Raises `RuntimeError`, one sentence with the last line of Ray's log, if the cluster takes no jobs within
    `start_seconds`. None of its processes outlives the block, nor this process, however it ends.
    """
    keep_direct()
    with ExitStack() as stack:
        with progress_line("starting Ray"):
            for is_last in (False, True):
                starting = _head(num_cpus=num_cpus, start_seconds=start_seconds, folder=ROOT, **{AUTH_MODE: "token"})
                head, cluster = stack.enter_context(starting)
                try:
                    _wait_until_up(head, cluster, seconds=start_seconds)
                except _Ended:
                    if is_last:
                        raise
                    stack.close()
                else:
                    break
        yield cluster


def connect(
    *,
    address: str | None = None,
    num_cpus: int = 4,
    worker_logs: bool = True,
    start_seconds: float = START_SECONDS,
    answer_seconds: float = ANSWER_SECONDS,
) -> bool:
    """Joins the cluster at `address`, by default at `RAY_ADDRESS` (set inside a submitted job). Without an address, or
    at "local", it starts a cluster, which ends with this process at the latest.

    `worker_logs` shows what workers print. Returns whether the caller must `disconnect()`: a caller who was connected
    before must not. The name of a cluster that was joined is printed on stderr.

    Raises `RuntimeError`, one sentence, if the cluster at `RAY_ADDRESS` does not answer within `answer_seconds`, or if
    none starts within `start_seconds`; no process is left behind then. Raises `ValueError` for a `RAY_ADDRESS` that
    names no one cluster, and for an `address` of another cluster than the one that this process is connected to.
    """
    if ray.is_initialized():
        if address is not None:
            _check_joined(address)
        return False
    keep_direct()
    log_settings = {"logging_level": "warning", "log_to_driver": worker_logs}
    named = "RAY_ADDRESS" if address is None else "cluster"
    address = address_to_join(address)
    if address is None:
        _connect_to_own(num_cpus=num_cpus, start_seconds=start_seconds, **log_settings)
        _print_own_lines()
        return True
    check_answer(address, named=named, seconds=answer_seconds)
    if starts_workers_by_uv():
        print(
            "uv run: Ray sends this folder to the cluster, which starts each worker by uv in its copy; with "
            f"{WORKERS_BY_UV}=0 workers have their node's own environment",
            file=sys.stderr,
            flush=True,
        )
    try:
        with progress_line(f"connecting to the Ray cluster at {address}"):
            ray.init(address, **log_settings)
    except Exception as error:  # Ray has no narrower type for it
        ray.shutdown()
        raise RuntimeError(f"the Ray cluster at {named}={address} does not answer: {_one_line(error)}") from error
    keep_direct(_node_addresses())
    print(f"on the Ray cluster at {address}", file=sys.stderr, flush=True)
    _print_own_lines()
    return True


_own = ExitStack()  # ends the cluster that this process has started
atexit.register(_own.close)


def disconnect() -> None:
    """End the connection, and the cluster if `connect` started it."""
    ray.shutdown()
    _own.close()


def _check_joined(address: str) -> None:
    """Raise `ValueError` if this process is connected to another cluster than the one at `address`."""
    joined, named = ray.get_runtime_context().gcs_address, address_to_join(address)
    if named is None or not _is_same(named, joined):
        raise ValueError(
            f"this process is connected to the Ray cluster at {joined}, so cluster={address} cannot be had: call "
            "ray.shutdown() first, or leave it out"
        )


def _is_same(first: str, second: str) -> bool:
    """Whether two addresses, each host:port, are one place as this machine resolves them."""
    (first_host, _, first_port), (second_host, _, second_port) = first.rpartition(":"), second.rpartition(":")
    if first_port != second_port:
        return False
    own = {"127.0.0.1", "localhost", ray.util.get_node_ip_address()}
    if first_host == second_host or {first_host, second_host} <= own:
        return True
    with suppress(OSError):
        return socket.gethostbyname(first_host) == socket.gethostbyname(second_host)
    return False


_kept: deque[str] = deque(maxlen=KEPT_LINES)


def ray_lines() -> str:
    """The newest lines that workers and Ray wrote to their standard error, which no terminal showed."""
    return "".join(f"{line}\n" for line in _kept)


def _print_own_lines() -> None:
    """From now on prints the workers' standard output unchanged, and keeps their other lines for `ray_lines`."""
    handle_worker_lines(_take_lines)


def _take_lines(batch: dict[str, Any]) -> None:
    """A worker's lines, as Ray's log monitor sends them: its pid, its actor's class, and the stream they are from."""
    if batch["is_err"] or batch["pid"] in ("autoscaler", "raylet", "gcs_server"):
        _kept.extend(f"({batch.get('actor_name') or batch['pid']}) {line}" for line in batch["lines"])
    else:
        print(*batch["lines"], sep="\n", flush=True)


@contextmanager
def progress_line(task: str) -> Iterator[None]:
    """A line on standard error while the block takes long: on a terminal a line that counts, else a new line now and
    then."""
    end, is_terminal = threading.Event(), sys.stderr.isatty()
    start = time.monotonic()

    def show() -> None:
        wait = ALIVE_SECONDS if is_terminal else ALIVE_LOG_SECONDS
        while not end.wait(wait):
            line = f"{task} ... {time.monotonic() - start:.0f} s"
            print(f"\r{line}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
            wait = 1.0 if is_terminal else ALIVE_LOG_SECONDS
        if is_terminal and wait == 1.0:  # the line was shown, and is cleared
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _node_addresses() -> Iterator[str]:
    for node in ray.nodes():
        yield from (node["NodeManagerAddress"], node["NodeManagerHostname"])


def address_to_join(given: str | None = None) -> str | None:
    """The address of the cluster that `connect` joins, `None` if it starts a cluster. Raises `ValueError` if the given
    address, by default `RAY_ADDRESS`, names no single cluster."""
    address = given or os.environ.get("RAY_ADDRESS")
    noun = "RAY_ADDRESS" if given is None else "cluster"
    return None if not address or address == "local" else _one_cluster(address, noun)


def _one_cluster(address: str, noun: str) -> str:
    """The address of the one cluster that `address` names; refusals call the address `noun`.

    Ray itself takes "auto" for the cluster that was started last, or for any, other users' clusters among them.
    """
    if address.startswith(("http://", "https://")):
        raise ValueError(
            f"{noun}={address} is a dashboard, which takes jobs: submit this one there (ray job submit --address "
            f"{address} --working-dir . -- python jobs/...), or give the cluster's own address, host:port"
        )
    if address != "auto":
        return address
    addresses = cluster_addresses()
    if not addresses:
        raise ValueError(f"{noun}=auto finds no Ray cluster on this machine; give its address, host:port")
    if len(addresses) > 1:
        raise ValueError(
            f"{noun}=auto could mean any of {len(addresses)} Ray clusters on this machine: "
            f"{', '.join(addresses)}; set it to one of them"
        )
    return addresses[0]


def _connect_to_own(*, num_cpus: int, start_seconds: float, **settings: Any) -> None:
    """Start a cluster in processes of its own and connect to it; both end with `disconnect` or this process."""
    before = {name: os.environ.get(name) for name in (TOKEN_PATH, AUTH_MODE)}
    make_token()
    with ExitStack() as stack, progress_line("starting Ray"):
        try:
            cluster, address = _start_head(stack, num_cpus=num_cpus, start_seconds=start_seconds)
        except _Ended:  # Ray gives its node half a minute, and a busy machine may need more
            stack.close()
            cluster, address = _start_head(stack, num_cpus=num_cpus, start_seconds=start_seconds)
        os.environ[TOKEN_PATH] = cluster.environment[TOKEN_PATH]
        forget_token()
        stack.callback(ray.shutdown)
        try:
            with on_loopback():
                ray.init(address, **settings)
        except Exception as error:  # Ray has no narrower type for it
            raise RuntimeError(f"the local Ray cluster started and does not answer: {_one_line(error)}") from error
        _own.callback(_set_back, before)
        _own.enter_context(stack.pop_all())


def _set_back(variables: Mapping[str, str | None]) -> None:
    """Give variables of the environment the values that they had, and read Ray's token anew."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    forget_token()


def _start_head(stack: ExitStack, *, num_cpus: int, start_seconds: float) -> tuple[LocalCluster, str]:
    """A head that is up, with its address; `stack` ends it."""
    head, cluster = stack.enter_context(_head(num_cpus=num_cpus, start_seconds=start_seconds, folder=Path.cwd()))
    return cluster, _wait_until_started(head, cluster, seconds=start_seconds)


def check_answer(address: str, *, named: str = "RAY_ADDRESS", seconds: float = ANSWER_SECONDS) -> None:
    """Raise `RuntimeError` if no cluster answers there. A child process asks, since `ray.init` would try for minutes.

    The address of a client's server (`ray://`) is not asked.
    """
    if "://" in address:
        return
    command = [sys.executable, "-P", "-c", ASK, f"--address={address}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            select.select([child.stdout], [], [], START_SECONDS)  # on a busy machine the child's own start takes long
            output, errors = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            reason = f"within {seconds:g} s"
        else:
            if child.returncode == 0:
                return
            reason = f"as it should: {_last_line(errors or output)}"
    raise RuntimeError(f"the Ray cluster at {named}={address} does not answer {reason}")


def start_ray(*, start_seconds: float = START_SECONDS, **settings: Any) -> None:
    """Start a cluster that ends with this process, by `ray.init` with `settings`, and connect to it.

    Raises `RuntimeError`, one sentence, if it does not start. Ray waits `start_seconds` for its first process, the
    GCS. It waits half a minute for the node's own process, and this time cannot be set: so a start that fails is tried
    once more.
    """
    keep_direct()
    os.environ[GCS_SECONDS] = f"{start_seconds:.0f}"
    os.environ["PYTHONPATH"] = _with_root(os.environ.get("PYTHONPATH"))
    for is_last in (False, True):
        try:
            with on_loopback(), progress_line("starting Ray"):
                ray.init("local", object_store_memory=OBJECT_STORE_BYTES, **settings)
            return
        except ValueError:  # a wrong setting
            raise
        except Exception as error:  # Ray has no narrower type for a start that fails
            ray.shutdown()
            if is_last:
                sentence = f"no Ray cluster could be started on this machine, twice: {_one_line(error)}"
                raise RuntimeError(sentence) from error


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports nobody listens on at this moment."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind((LOOPBACK, 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextmanager
def _head(
    *, num_cpus: int, start_seconds: float, folder: Path, **variables: str
) -> Iterator[tuple["subprocess.Popen[bytes]", LocalCluster]]:
    """A head node that is starting, under a supervisor (`cluster/supervisor.py`) that ends it with this process.

    Its workers run in `folder`; `variables` are added to its environment. Its ports are open to every user of this
    machine, so the cluster asks for a token of its own, which only this user can read.
    """
    session = _session_folder()
    token = session / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    port, dashboard_port, agent_port, client_port = free_ports(4)
    cluster = LocalCluster(
        dashboard_url=f"http://{LOOPBACK}:{dashboard_port}",
        environment={
            **os.environ,
            "RAY_ADDRESS": f"{LOOPBACK}:{port}",
            "RAY_API_SERVER_ADDRESS": f"http://{LOOPBACK}:{dashboard_port}",
            TOKEN_PATH: str(token),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": _short_link(session, tempfile.gettempdir()),
            GCS_SECONDS: f"{start_seconds:.0f}",
            SEVERAL_NODES: "0",
            WORKERS_BY_UV: os.environ.get(WORKERS_BY_UV, "0"),
            "PYTHONPATH": _with_root(os.environ.get("PYTHONPATH")),
            # A submitted job calls `python`, which must be this interpreter.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            **variables,
        },
        log=session / "head.log",
    )
    command = [
        *(sys.executable, "-P", str(SUPERVISOR), str(os.getpid()), str(session)),
        *(_interpreter(session), *RAY_START[1:], "--head", "--block", "--log-color=false"),
        *(f"--node-ip-address={LOOPBACK}", f"--port={port}"),
        *(f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard_port}"),
        # By default every cluster of a machine takes the same two ports; the second then takes no jobs.
        *(f"--dashboard-agent-listen-port={agent_port}", f"--ray-client-server-port={client_port}"),
        *(f"--num-cpus={num_cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={session}"),
    ]
    environment = {k: v for k, v in cluster.environment.items() if k not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    with cluster.log.open("w") as log:
        supervisor = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
    try:
        yield supervisor, cluster
    finally:
        _stop(supervisor)
        shutil.rmtree(session, ignore_errors=True)  # a killed supervisor has left it


def _session_folder() -> Path:
    """A folder for Ray's files. Its path is short, wherever TMPDIR points: the paths of sockets below it have at most
    107 bytes.

    Raises `RuntimeError` if none can be made.
    """
    problems = []
    for place in SESSION_PLACES:
        try:
            return Path(tempfile.mkdtemp(prefix="mbd-", dir=place))
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
    raise RuntimeError(
        f"a local Ray cluster needs a folder that can be written, and there is none: {'; '.join(problems)}"
    )


def _short_link(session: Path, folder: str) -> str:
    """A folder's path, or a shorter path to it: the paths of sockets below it have at most 107 bytes."""
    if len(os.fsencode(folder)) <= MOST_BYTES:
        return folder
    (session / "tmp").symlink_to(folder)
    return str(session / "tmp")


def _interpreter(session: Path) -> str:
    """The interpreter that starts Ray, by a path without spaces: Ray splits its workers' commands at them."""
    if len(RAY_START[0].split()) == 1:
        return RAY_START[0]
    (session / "python").symlink_to(sys.prefix)
    return str(session / "python" / Path(RAY_START[0]).relative_to(sys.prefix))


def _with_root(path: str | None) -> str:
    return os.pathsep.join(filter(None, [str(ROOT), path]))


def _wait_until_up(head: subprocess.Popen[bytes], cluster: LocalCluster, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    # The dashboard answers some seconds before the cluster takes jobs. So the cluster is up when it has taken a job.
    request = urllib.request.Request(f"{cluster.dashboard_url}/api/jobs/", data=b'{"entrypoint": "true"}')
    request.add_header("Authorization", f"Bearer {Path(cluster.environment[TOKEN_PATH]).read_text()}")
    request.add_header("Content-Type", "application/json")
    # A request submits a job, which takes long on a busy machine: no request is given up before the deadline.
    while head.poll() is None and (seconds_left := deadline - time.monotonic()) > 0:
        try:
            with urllib.request.urlopen(request, timeout=seconds_left):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.3)
    raise _start_failure(head, cluster, f"took no job within {seconds:g} s")


def _wait_until_started(head: subprocess.Popen[bytes], cluster: LocalCluster, *, seconds: float) -> str:
    """The cluster's address, which `ray start` writes into a file once the node is up."""
    deadline = time.monotonic() + seconds
    address = cluster.log.with_name("ray_current_cluster")
    while head.poll() is None and time.monotonic() < deadline:
        if address.exists() and (written := address.read_text().strip()):
            return written
        time.sleep(0.1)
    raise _start_failure(head, cluster, f"did not start within {seconds:g} s")


class _Ended(RuntimeError):
    """The head ended by itself while it was starting."""


def _start_failure(head: subprocess.Popen[bytes], cluster: LocalCluster, lateness: str) -> RuntimeError:
    kind = RuntimeError if head.poll() is None else _Ended
    reason = lateness if head.poll() is None else f"ended with exit code {head.returncode}"
    return kind(f"the local Ray cluster {reason}; its log ends: {_last_line(cluster.log.read_text())}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "(it is empty)"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _stop(supervisor: subprocess.Popen[bytes]) -> None:
    """Let the supervisor end the head with all its descendants, and wait until it has."""
    supervisor.terminate()
    with suppress(subprocess.TimeoutExpired):
        supervisor.wait(timeout=60)
    with suppress(ProcessLookupError):
        os.killpg(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
