"""Jobs and a served model spread over hosts; a host that dies or is cut off costs time and no result.

The hosts are network namespaces with disks of their own (`tests/support/clusters/host_cluster.py`): runs, reports and
the served model lie in an object storage, and a model of the head is carried to the others.
`pytest tests/hosts -s` prints what faults cost.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from host_cluster import (
    FOLDERS,
    PATIENCE,
    PREFIX,
    Host,
    HostCluster,
    NoNamespaces,
    connected_hosts,
    host_cluster,
    wait_for,
)
from object_store import use_store
from served_hosts import GATEWAY, SERVED_ENGINE, Client, deployed, say

from mbd_core.checkpoint.shipped import model_folder
from mbd_core.evaluation.sweep.folder import REPORT, read_samples
from mbd_core.multitf.run.checkpoints import MARKER
from mbd_core.multitf.run.curve_file import LOSSES
from mbd_core.storage.folder import Folder

# Hosts have a CPU each, so that two processes that ask for one lie on two hosts.
TRAINERS, STEPS = 2, 8
# What the gateway counts: answers, and how often a request lost its engine.
ANSWERS, LOST = "ray_mbd_request_success_total", "ray_mbd_request_lost_replicas_total"
# What Ray calls our actors.
TRAINER, ENGINE = "RayTrainWorker", "MapWorker(MapBatches(DecodeActor))"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips where no hosts can be made."""
    try:
        with connected_hosts(["probe"]):
            pass
    except NoNamespaces as error:
        pytest.skip(f"no hosts can be made on this machine: {error}")


@pytest.fixture(scope="module")
def cluster(namespaces: None) -> Iterator[HostCluster]:
    started = time.monotonic()
    with host_cluster(num_workers=4, disks="private") as cluster, pytest.MonkeyPatch.context() as patch:
        use_store(cluster.store, patch)
        cluster.start(*cluster.workers[:2])
        say("the cluster is up", since=started)
        yield cluster


class Training:
    """A submitted training of a few updates, with a checkpoint after each."""

    def __init__(self, cluster: HostCluster, base: Path, place: Path) -> None:
        storage = Folder.at(f"s3://bucket/{place.name}")
        self.cluster, self.folder, self.log = cluster, storage / "run", place / "job.log"
        options = {"--recipe": "tiny-bd", "--base": base, "--precision": "float32", "--workers": TRAINERS}
        options |= {
            "--steps": STEPS,
            "--set": "checkpoint_every=1",
            "--storage": storage,
            "--run-name": self.folder.name,
        }
        arguments = [str(part) for option in options.items() for part in option]
        self.job = cluster.submit("python", "jobs/train_multitf.py", *arguments, log=self.log)

    def workers(self, *, other_than: dict[str, str] | None = None) -> dict[str, str]:
        """All training processes, once there are as many as asked for, none of them in `other_than`."""

        def started() -> dict[str, str]:
            assert self.job.poll() is None, self.log.read_text()
            living = self.cluster.actors(TRAINER)
            return living if len(living) == TRAINERS and not living.keys() & (other_than or {}).keys() else {}

        return wait_for(started, "the training processes")

    def wait_for_step(self, step: int) -> None:
        """Until the checkpoint of that step, or of a later one, is whole."""
        wait_for(lambda: any(written >= step for written in self.whole_checkpoints()), f"step {step}")

    def whole_checkpoints(self) -> list[int]:
        system, path = self.folder.filesystem()
        markers = [Path(marker) for marker in system.glob(f"{path}/step_*/{MARKER}")]
        return [int(marker.parent.name.removeprefix("step_")) for marker in markers]

    def finish(self) -> str:
        """The log of the job, which succeeds."""
        assert self.job.wait(timeout=PATIENCE) == 0, self.log.read_text()
        return self.log.read_text()

    def losses(self) -> list[float]:
        return [json.loads(line)["loss"] for line in (self.folder.read_text(LOSSES) or "").splitlines()]


@pytest.fixture(scope="module")
def model(cluster: HostCluster, tiny_model_dir: Path) -> Path:
    """A model folder that the head alone has."""
    shutil.copytree(tiny_model_dir, cluster.head.outside(cluster.disk / "model"))
    return cluster.disk / "model"


@pytest.fixture(scope="module")
def undisturbed(cluster: HostCluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing happens to, on two hosts."""
    training = Training(cluster, model, tmp_path_factory.mktemp("undisturbed"))
    assert set(training.workers().values()) == {host.address for host in cluster.workers[:2]}
    log = training.finish()
    assert f"recipe tiny-bd: {STEPS} steps of 48 samples in float32, {TRAINERS} workers" in log
    assert f"step {STEPS}/{STEPS}  loss " in log
    assert f"\nmodel: {training.folder / 'model'}\n" in log
    assert (training.folder / "model").read_text("config.json")
    return training.losses()


def test_a_submitted_job_trains_on_two_hosts(undisturbed: list[float]) -> None:
    assert len(undisturbed) == STEPS
    assert undisturbed[-1] < undisturbed[0]


def test_a_training_outlives_a_host_that_dies_and_one_that_is_cut_off(
    cluster: HostCluster, undisturbed: list[float], model: Path, tmp_path: Path
) -> None:
    """The one that joins in a dead one's place was not there when the job looked at its hosts."""
    training = Training(cluster, model, tmp_path)
    workers = training.workers()
    dying, leaving, joining = cluster.workers[:3]

    training.wait_for_step(2)
    fault = time.monotonic()
    dying.kill()
    wait_until_dead(cluster, dying)
    say("a killed host is taken for dead", since=fault)
    cluster.start(joining)
    say("its replacement has joined", since=fault)
    workers = training.workers(other_than=workers)
    say("all training processes run again", since=fault)

    training.wait_for_step(5)
    say("and have gone on", since=fault)
    assert list(joining.outside(cluster.home / ".cache/mbd-cluster/carried").glob("*/model"))
    fault = time.monotonic()
    leaving.cut_off()
    wait_until_dead(cluster, leaving)
    say("a host that is cut off is taken for dead", since=fault)
    assert leaving.is_up, "what is cut off lives on, unaware"
    connected = time.monotonic()
    leaving.reconnect()
    wait_for(lambda: not leaving.is_up, "the end of a node that comes back as a dead one")
    say("connected again, it ends itself", since=connected)
    cluster.start(leaving)
    training.workers(other_than=workers)
    say("all training processes run again, since the fault", since=fault)

    log = training.finish()
    say("the training is done, since the fault", since=fault)
    assert log.count("resumed after step") == 2
    assert training.losses() == undisturbed
    joining.kill()
    cluster.start(dying)


def wait_until_dead(cluster: HostCluster, host: Host) -> None:
    wait_for(lambda: host.address not in cluster.living_addresses(), f"the end of {host.name}")


@pytest.mark.parametrize("fault", ["dies", "is cut off"])
def test_a_sweep_outlives_the_host_of_its_engine(
    fault: str, cluster: HostCluster, model: Path, tmp_path: Path
) -> None:
    """Its engine is on one host and the grading on the other: each takes a CPU."""
    out, log = Folder.at(f"s3://bucket/{tmp_path.name}"), tmp_path / "job.log"
    options = {"--models": model, "--tasks": "gsm-mini,code-mini", "--grid": "tau_m2t=0.5,0.9;buffer_size=2"}
    options |= {"--limit": 16, "--max-tokens": 32, "--max-rows": 2, "--timed": 0, "--out": out}
    arguments = [str(part) for option in options.items() for part in option]
    job = cluster.submit("python", "jobs/eval_sweep.py", *arguments, log=log)

    def engine() -> list[str]:
        assert job.poll() is None, log.read_text()
        return list(cluster.actors(ENGINE).values())

    (address,) = wait_for(engine, "the engine")
    (leaving,) = (host for host in cluster.workers if host.address == address)
    began = time.monotonic()
    leaving.kill() if fault == "dies" else leaving.cut_off()
    wait_until_dead(cluster, leaving)
    say("the host is taken for dead", since=began)
    if fault == "is cut off":
        leaving.reconnect()
        wait_for(lambda: not leaving.is_up, "the end of a node that comes back as a dead one")
    cluster.start(leaving)
    assert job.wait(timeout=PATIENCE) == 0, log.read_text()
    say("the sweep is done", since=began)

    assert f"The report is in {out}" in log.read_text()
    report = out.fetch(tmp_path / "report")
    assert (report / REPORT).exists()
    samples = list(read_samples(report))
    assert sorted(sample["sample"] for sample in samples) == list(range(2 * 4 * 16))  # tasks, settings, problems
    assert not any(sample["error"] for sample in samples)


@pytest.fixture(scope="module")
def at_url(cluster: HostCluster) -> str:
    """The shipped tiny-mbd in the object storage."""
    place = Folder.at("s3://bucket/tiny-mbd")
    for file in model_folder("tiny-mbd").iterdir():
        if file.is_file():
            place.write_file(file.name, file)
    return str(place)


@pytest.fixture
def served(cluster: HostCluster, at_url: str) -> Iterator[Client]:
    """Two engines and the gateway on a host each."""
    first_two, others = cluster.workers[:2], cluster.workers[2:]
    cluster.start(*(host for host in first_two if not host.is_up), others[0])
    try:
        with deployed(cluster, through=cluster.head, model=at_url) as client:
            yield client
    finally:
        for host in others:
            host.kill()


def host_of_a_busy_engine(cluster: HostCluster, served: Client) -> Host:
    """A host whose engine decodes at least 8 requests, once there is one."""
    busy = wait_for(lambda: [id for id, running in served.engines().items() if running >= 8], "a busy engine")
    engines = cluster.actors(SERVED_ENGINE)
    (address,) = (address for name, address in engines.items() if name.endswith(f"#{busy[0]}"))
    (host,) = (host for host in cluster.workers if host.address == address)
    return host


def test_a_host_that_is_to_stop_ends_its_requests_first(cluster: HostCluster, served: Client) -> None:
    """What a Kubernetes node's drain does to a pod, with room elsewhere: no request loses its engine."""
    spare = cluster.workers[3]
    cluster.start(spare)
    questions = range(10, 50)
    with ThreadPoolExecutor(2 * len(questions)) as threads:
        wanted = list(threads.map(served.whole, questions))
        streams = [threads.submit(served.streamed, cups) for cups in questions]
        stopping = host_of_a_busy_engine(cluster, served)
        stopped = time.monotonic()
        stopping.drain()
        replies = [threads.submit(served.whole, cups) for cups in questions]
        streamed = [stream.result(PATIENCE) for stream in streams]
        say("all streams have ended", since=stopped)
        assert [reply.result(PATIENCE) for reply in replies] == wanted
        say("all replies that came after the signal have ended", since=stopped)
        assert [stream.text for stream in streamed] == wanted
    print(f"         longest pause of a stream: {max(stream.longest_pause for stream in streamed):.1f} s")

    def counts() -> list[float]:
        """Both of one page, once all answers are counted."""
        found = cluster.counted(ANSWERS, LOST)
        return found if found[0] >= 3 * len(questions) else []

    assert wait_for(counts, "the count of all answers")[1] == 0, "no test before this one kills an engine"
    wait_for(lambda: not stopping.is_up, "the end of the host's node")
    say("the node has ended", since=stopped)
    wait_for(lambda: len(served.engines()) == 2, "two engines")
    say("two engines are ready", since=stopped)
    assert stopping.address not in cluster.actors(SERVED_ENGINE).values()
    assert served.whole(questions[0]) == wanted[0]


def test_streams_and_replies_outlive_the_host_of_their_engine(cluster: HostCluster, served: Client) -> None:
    questions = range(10, 50)
    with ThreadPoolExecutor(2 * len(questions)) as threads:
        wanted = list(threads.map(served.whole, questions))
        engines, gateways = cluster.actors(SERVED_ENGINE), cluster.actors(GATEWAY)
        assert len({*engines.values(), *gateways.values()}) == 3

        streams = [threads.submit(served.streamed, cups) for cups in questions]
        replies = [threads.submit(served.whole, cups) for cups in questions]
        dying = host_of_a_busy_engine(cluster, served)
        fault = time.monotonic()
        dying.kill()
        assert not all(answer.done() for answer in streams)
        streamed = [stream.result(PATIENCE) for stream in streams]
        say("all streams have ended", since=fault)
        assert [reply.result(PATIENCE) for reply in replies] == wanted
        assert [stream.text for stream in streamed] == wanted
    wait_for(lambda: cluster.counted(LOST)[0] > 0, "the count of requests that lost their engine")
    pauses = sorted(stream.longest_pause for stream in streamed)
    say("all replies have ended", since=fault)
    print(f"         longest pauses of streams: {', '.join(f'{pause:.1f} s' for pause in pauses[-8:])}")

    cluster.start(dying)
    say("a host has joined in its place", since=fault)
    wait_for(lambda: len(cluster.actors(SERVED_ENGINE)) == len(served.engines()) == 2, "two engines")
    say("two engines are ready again", since=fault)
    assert served.whole(questions[0]) == wanted[0]


KILLED_RUN = """
import subprocess, sys, time
from host_cluster import connected_hosts
with connected_hosts(["left"]) as ([host], folder):
    subprocess.Popen(host.command("sleep", "600"))
    print(folder, flush=True)
    time.sleep(600)
"""


def test_the_next_run_removes_the_hosts_of_a_killed_one(namespaces: None) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen([sys.executable, "-c", KILLED_RUN], env=environment, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    left = Path(run.stdout.readline().strip())
    run.send_signal(signal.SIGKILL)
    run.wait()
    tag = left.name.rpartition("-")[2]

    def traces() -> str:
        listing = (["ip", "netns", "list"], ["ip", "-o", "link"], ["ps", "-eo", "args"])
        text = "".join(subprocess.run(command, capture_output=True, text=True).stdout for command in listing)
        return "\n".join(line for line in text.splitlines() if f"{PREFIX}-{tag}" in line or f"{PREFIX}{tag}" in line)

    assert left.exists() and f"{PREFIX}-{tag}-left" in traces()
    with connected_hosts(["next"]) as ([host], folder):
        assert not left.exists() and not traces()
        assert folder in FOLDERS.iterdir() and host.folder.exists()
    assert not folder.exists()
