"""Several hosts on this machine: network namespaces on a bridge, each with a Ray node, that can be killed and cut off.

A host has an address, a name and processes of its own; the clock is shared by all, and so is the file system unless
the cluster has private disks. That takes Linux, `ip` and the right to make namespaces; `NoNamespaces` says what is
missing. Nothing outlives the block, and what a run that was killed left behind is removed by the next one.
"""

import fcntl
import ipaddress
import json
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
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from manifests import BASE_CLUSTER_FILE, environment
from object_store import SERVER, client_environment, make_bucket

from cluster.local import RAY_START, SUPERVISOR

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 1200.0  # seconds until a test gives up waiting for a state
PREFIX = "mbdh"
FOLDERS = Path("/var/tmp")  # a short path, wherever TMPDIR points: Ray's sockets lie below it
TMP = Path("/tmp")
STORE_PORT = 5000
Disks = Literal["shared", "private"]
LOCK = "lock"
RAY = RAY_START[:-1]  # the command `ray` of this environment
PRIVATE = ipaddress.ip_network("10.213.0.0/16")  # each machine of hosts takes a free /24 of it
OBJECT_STORE_BYTES = 100 * 2**20
# Beside a network a host has a name, which resolves to its address as a pod's does, and sees its own processes only.
# The shell collects orphans; it would not if it made way for the command, as it does for a last one.
UNSHARED = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
AS_HOST = """
hostname "$0"
while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit 1; shift 2; done
shift
"$@"
exit $?
"""

State = TypeVar("State")


class NoNamespaces(RuntimeError):
    """This machine does not let us make network namespaces; the message is the system's own."""


def wait_for(state: Callable[[], State], what: str, *, seconds: float = PATIENCE) -> State:
    """The first truthy value of `state()`; fails once `seconds` have passed. An answer that fails is asked again."""
    deadline, problem = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            if value := state():
                return value
        except OSError as error:
            problem = error
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds:g} s for {what}; last error: {problem}")


@dataclass(kw_only=True)
class Host:
    """A network namespace and the Ray node in it; `link` is the bridge's end of its cable.

    `disk` and /tmp are folders that each host has of its own, at the same paths; without `disk` it has none.
    """

    name: str
    address: str
    namespace: str
    link: str
    folder: Path
    disk: Path | None = None
    node: "subprocess.Popen[bytes] | None" = None

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs `arguments` on this host."""
        mounts = {self.folder / "hosts": Path("/etc/hosts")}
        if self.disk is not None:
            mounts |= {self.outside(place): place for place in (TMP, self.disk)}
        pairs = [str(path) for pair in mounts.items() for path in pair]
        return [
            "ip",
            "netns",
            "exec",
            self.namespace,
            *UNSHARED,
            "sh",
            "-c",
            AS_HOST,
            self.name,
            *pairs,
            "--",
            *arguments,
        ]

    def outside(self, path: str | Path) -> Path:
        """Where this process finds what the host has at `path`, on its disk or below /tmp."""
        assert self.disk is not None
        for place in (TMP, self.disk):
            if Path(path).is_relative_to(place):
                return self.folder / place.name / Path(path).relative_to(place)
        raise AssertionError(f"{path} does not lie on {self.name}'s own disk")

    @property
    def is_up(self) -> bool:
        """Whether the Ray node runs, in the cluster or cut off from it."""
        return self.node is not None and self.node.poll() is None

    def kill(self) -> None:
        """SIGKILL every process of the host."""
        _kill_all(self.namespace)
        if self.node is not None:
            self.node.wait()
            self.node = None

    def drain(self) -> None:
        """What a pod that is to stop gets: SIGTERM to its first process, `ray start`."""
        for pid in _pids(self.namespace):
            with suppress(FileNotFoundError, ProcessLookupError):
                program, *arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if program == RAY[0] and "start" in arguments and "--block" in arguments:
                    os.kill(pid, signal.SIGTERM)
                    return
        raise AssertionError(f"no `ray start` runs on {self.name}")

    def cut_off(self) -> None:
        """Pull the cable: the processes live on, and no packet comes or goes."""
        _ip("link", "set", self.link, "down")

    def reconnect(self) -> None:
        _ip("link", "set", self.link, "up")


@dataclass(frozen=True)
class HeadState:
    """A Redis beside the cluster, in which the head keeps its state."""

    address: str
    password: str

    @property
    def environment(self) -> dict[str, str]:
        """What KubeRay sets for `gcsFaultToleranceOptions`: nodes wait for a lost head instead of ending."""
        return {
            "RAY_REDIS_ADDRESS": self.address,
            "RAY_external_storage_namespace": "hosts",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }


def pod_environment() -> dict[str, str]:
    """The variables that the manifests give to every pod of a cluster: checks of health, drains."""
    head = yaml.safe_load(BASE_CLUSTER_FILE.read_text())["spec"]["headGroupSpec"]
    return environment(head["template"]["spec"]["containers"][0])


class HostCluster:
    """A Ray cluster whose nodes are hosts; `hosts[0]` is the head, which runs no tasks.

    `store` is the environment of an object store's clients.
    """

    def __init__(
        self, hosts: Sequence[Host], folder: Path, *, state: "HeadState | None" = None, store: dict[str, str]
    ) -> None:
        self.hosts, self.folder, self._kept, self.store = hosts, folder, state, store
        self._jobs: list[subprocess.Popen[bytes]] = []
        self.token = folder / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32))
        self.url = f"http://{hosts[0].address}:8265"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USAGE_STATS_ENABLED": "0",
            **pod_environment(),
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",  # of many hosts on one machine
            "OMP_NUM_THREADS": "1",
            **({} if state is None else state.environment),
            **store,
            **({} if self.head.disk is None else {"HOME": str(self.home)}),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        }

    @property
    def client_environment(self) -> dict[str, str]:
        """What a command needs that talks to the cluster's dashboard."""
        return {**self.environment, "RAY_API_SERVER_ADDRESS": self.url, "RAY_DASHBOARD_ADDRESS": self.url}

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def disk(self) -> Path:
        """The path of every host's own disk."""
        assert self.head.disk is not None
        return self.head.disk

    @property
    def home(self) -> Path:
        """The home folder, whose caches and runs are each host's own."""
        return self.disk / "home"

    @property
    def workers(self) -> Sequence[Host]:
        return self.hosts[1:]

    def start(self, *hosts: Host, num_cpus: int = 1) -> None:
        """Start these hosts' Ray nodes and wait until the cluster has them; the head, too, until it takes jobs."""
        for host in hosts:
            self._launch(host, num_cpus=num_cpus)
        for host in hosts:
            wait_for(lambda host=host: self._has_joined(host, num_cpus=num_cpus), f"the node on {host.name}")

    def _launch(self, host: Host, *, num_cpus: int) -> None:
        # A node that comes again must not meet its old files; the path is short for Ray's sockets (107 bytes).
        session = Path(tempfile.mkdtemp(prefix="r", dir=host.folder))
        options = [f"--node-ip-address={host.address}", f"--num-cpus={num_cpus}", f"--temp-dir={session}"]
        options += ["--block", "--log-color=false", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        if host is self.head:
            options += ["--head", f"--dashboard-host={host.address}"]
            options += [] if self._kept is None else [f"--redis-password={self._kept.password}"]
        else:
            options += [f"--address={self.head.address}:6379"]
        supervised = [sys.executable, "-P", str(SUPERVISOR), str(os.getpid()), str(session)]
        with (host.folder / "ray.log").open("a") as log:
            host.node = subprocess.Popen(
                [*supervised, *host.command(*RAY, "start", *options)],
                env=self.environment,
                cwd=host.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _has_joined(self, host: Host, *, num_cpus: int) -> bool:
        if not host.is_up:  # Ray gives its own processes half a minute, which a busy machine may exceed
            self._launch(host, num_cpus=num_cpus)
        if host is self.head:  # the dashboard answers some seconds before it takes jobs
            self.ask("/api/jobs/", b'{"entrypoint": "true"}')
        return host.address in self.living_addresses()

    def ask(self, path: str, data: bytes | None = None) -> Any:
        """The dashboard's answer to a GET, or to a POST of `data`."""
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        request.add_header("Authorization", f"Bearer {self.token.read_text()}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def living_addresses(self) -> list[str]:
        """The addresses of the nodes that the cluster takes to be alive."""
        return [node["node_ip"] for node in self._state("nodes", "state", "ALIVE")]

    def actors(self, class_name: str) -> dict[str, str]:
        """The living actors of a class: name or else id, and address of the host."""
        addresses = self._addresses()
        actors = self._state("actors", "class_name", class_name)
        return {
            actor["name"] or actor["actor_id"]: addresses[actor["node_id"]]
            for actor in actors
            if actor["state"] == "ALIVE"
        }

    def running(self, task: str) -> list[str]:
        """The addresses of the hosts that run tasks of this name."""
        addresses = self._addresses()
        return [
            addresses[found["node_id"]] for found in self._state("tasks", "name", task) if found["state"] == "RUNNING"
        ]

    def _addresses(self) -> dict[str, str]:
        """The address of each node by its id."""
        return {node["node_id"]: node["node_ip"] for node in self._state("nodes")}

    def _state(self, kind: str, key: str = "", value: str = "") -> list[dict[str, Any]]:
        query = [("limit", "1000"), ("detail", "1")]
        if key:
            query += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
        return self.ask(f"/api/v0/{kind}?{urllib.parse.urlencode(query)}")["data"]["result"]["result"]

    def counted(self, *names: str) -> list[float]:
        """Counters' sums over all nodes, as their metrics agents export them every few seconds.

        A node that does not answer is left out with all of its counters.
        """
        (file,) = self.head.folder.glob("r*/prom_metrics_service_discovery.json")
        totals = [0.0] * len(names)
        for target in json.loads(file.read_text())[0]["targets"]:
            with suppress(OSError), urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as page:
                for line in page.read().decode().splitlines():
                    name = line.partition("{")[0]
                    if name in names:
                        totals[names.index(name)] += float(line.rpartition(" ")[2])
        return totals

    def submit(self, *entrypoint: str, log: Path) -> "subprocess.Popen[bytes]":
        """`ray job submit --working-dir . -- ENTRYPOINT`, from beside the cluster; what it prints goes to `log`."""
        with log.open("w") as output:
            job = subprocess.Popen(
                [*RAY, "job", "submit", "--working-dir", ".", "--", *entrypoint],
                env=self.client_environment,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._jobs.append(job)
        return job

    def end_jobs(self) -> None:
        """End the commands of `submit` that still wait for their job."""
        for job in self._jobs:
            job.kill()
            job.wait()


@contextmanager
def host_cluster(*, num_workers: int, external_redis: bool = False, disks: Disks = "shared") -> Iterator[HostCluster]:
    """A head and `num_workers` hosts whose nodes are yet to `start`; raises `NoNamespaces` where none can be made.

    external_redis  the head keeps its state in a Redis on a host of its own, and can be killed and started again
    disks           private: `HostCluster.disk` (with the home folder) and /tmp are each host's own, and an S3 server
                    with the bucket `bucket` stands on a further host
    """
    names = ["head", *(f"worker{number}" for number in range(1, num_workers + 1))]
    names += ["redis"] * external_redis + ["objects"] * (disks == "private")
    with connected_hosts(names, disks=disks) as (hosts, folder):
        of_name = {host.name: host for host in hosts}
        store = _start_object_store(of_name["objects"]) if disks == "private" else {}
        state = _start_redis(of_name["redis"]) if external_redis else None
        cluster = HostCluster(hosts[: num_workers + 1], folder, state=state, store=store)
        try:
            cluster.start(cluster.head, num_cpus=0)
            yield cluster
        finally:
            cluster.end_jobs()


def _start_redis(store: Host) -> HeadState:
    """A Redis on `store`, which ends with the host."""
    state = HeadState(address=f"{store.address}:6379", password=secrets.token_hex(16))
    options = ["--bind", store.address, "--requirepass", state.password, "--dir", str(store.folder), "--save", ""]
    with (store.folder / "redis.log").open("w") as log:
        store.node = subprocess.Popen(
            store.command("redis-server", *options), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def listens() -> bool:
        with socket.create_connection((store.address, 6379), timeout=1):
            return True

    wait_for(listens, "Redis")
    return state


def _start_object_store(host: Host) -> dict[str, str]:
    """An S3 server on `host`, which ends with the host, and the environment of its clients."""
    with (host.folder / "objects.log").open("w") as log:
        host.node = subprocess.Popen(
            host.command(*SERVER, "-H", host.address, "-p", str(STORE_PORT)),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    environment = client_environment(f"http://{host.address}:{STORE_PORT}")
    make_bucket(environment, host.node)
    return environment


@contextmanager
def connected_hosts(names: Sequence[str], *, disks: Disks = "shared") -> Iterator[tuple[list[Host], Path]]:
    """Connected hosts of these names, and a folder that is theirs."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        raise NoNamespaces("network namespaces take Linux with the commands ip and unshare")
    for left in FOLDERS.glob(f"{PREFIX}-*"):
        _remove_leftover(left)
    tag, network = _free_network()
    hidden, folder = FOLDERS / f".{PREFIX}-{tag}", FOLDERS / f"{PREFIX}-{tag}"
    hidden.mkdir()
    with (hidden / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tells other runs that these hosts are in use
        hidden.rename(folder)
        try:
            try:
                hosts = _connect(folder, names, network, disks)
            except subprocess.CalledProcessError as error:
                raise NoNamespaces(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
            yield hosts, folder
        finally:
            _remove(folder)


def _free_network() -> tuple[str, ipaddress.IPv4Network]:
    """A network that no interface is in, and the tag by which its hosts are found."""
    used_networks = [
        ipaddress.ip_interface(line.split()[3]).network for line in _ip("-4", "-o", "address").splitlines()
    ]
    while True:
        tag = secrets.token_hex(2)
        network = list(PRIVATE.subnets(new_prefix=24))[int(tag[:2], 16)]
        if not any(network.overlaps(other) for other in used_networks):
            return tag, network


def _connect(folder: Path, names: Sequence[str], network: ipaddress.IPv4Network, disks: Disks) -> list[Host]:
    """Hosts on a bridge, which has an address itself, so that this process reaches them, too."""
    disk = folder / "disk" if disks == "private" else None
    if disk is not None:
        disk.mkdir()  # where the hosts' own are mounted
    tag = folder.name.rpartition("-")[2]
    bridge, gateway = f"{PREFIX}{tag}", str(network[1])
    _ip("link", "add", bridge, "type", "bridge")
    _ip("address", "add", f"{gateway}/{network.prefixlen}", "dev", bridge)
    _ip("link", "set", bridge, "up")
    hosts = []
    for number, name in enumerate(names):
        host = Host(
            name=name,
            address=str(network[number + 2]),
            namespace=f"{PREFIX}-{tag}-{name}",
            link=f"{bridge}v{number}",
            folder=folder / str(number),
            disk=disk,
        )
        host.folder.mkdir()
        if disk is not None:
            host.outside(disk / "home").mkdir(parents=True)
            host.outside(TMP).mkdir(mode=0o1777)
        (host.folder / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {host.name}\n")
        _ip("netns", "add", host.namespace)
        _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        _ip("link", "set", host.link, "master", bridge, "up")
        for arguments in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{host.address}/{network.prefixlen}", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", gateway),  # by it a process learns which address is its own
        ):
            _ip("-netns", host.namespace, *arguments)
        hosts.append(host)
    subprocess.run(hosts[0].command("true"), check=True, capture_output=True, text=True)
    return hosts


def _remove_leftover(folder: Path) -> None:
    """Remove the hosts of `folder` unless their test run lives."""
    with (folder / LOCK).open("a") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)


def _remove(folder: Path) -> None:
    """End every process of the hosts of `folder`, then remove what there is of hosts, bridge and files."""
    tag = folder.name.rpartition("-")[2]
    for line in _ip("netns", "list").splitlines():
        namespace = line.split()[0]
        if namespace.startswith(f"{PREFIX}-{tag}-"):
            _kill_all(namespace)
            _ip("netns", "delete", namespace)
    if f" {PREFIX}{tag}:" in _ip("-o", "link"):
        _ip("link", "delete", f"{PREFIX}{tag}")
    shutil.rmtree(folder, ignore_errors=True)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace).split()]


def _kill_all(namespace: str) -> None:
    """SIGKILL every process in the namespace, again until none lives."""
    deadline = time.monotonic() + PATIENCE
    while pids := _pids(namespace):
        assert time.monotonic() < deadline, f"processes {pids} do not end"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _ip(*arguments: str) -> str:
    """What `ip` prints."""
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
