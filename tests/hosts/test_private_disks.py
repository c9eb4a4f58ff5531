"""Every kind of job on hosts that share no disk, with an object store beside them.

The job's own process runs on the head, which has no CPU for workers.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_rows import chat, write_rows
from host_cluster import PATIENCE, HostCluster, NoNamespaces, connected_hosts, host_cluster, wait_for
from object_store import use_store
from served_hosts import say

from jobs import prepare_data
from mbd_core.evaluation.sweep.folder import REPORT, read_samples
from mbd_core.multitf.data.prepared import SAMPLES
from mbd_core.rl.folder import ITERATIONS
from mbd_core.storage.contents import contents_of
from mbd_core.storage.folder import Folder

pytestmark = pytest.mark.slow

ENCODING = "MapBatches(encode_batch)"  # what Ray calls the tasks that tokenise
RUN = ("--recipe", "tiny-bd", "--precision", "float32", "--steps", 4, "--set", "checkpoint_every=2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[HostCluster]:
    started = time.monotonic()
    try:
        with host_cluster(num_workers=4, disks="private") as cluster:
            cluster.start(*cluster.workers[:2])
            say("the cluster is up", since=started)
            yield cluster
    except NoNamespaces as error:
        pytest.skip(f"no hosts can be made on this machine: {error}")


@pytest.fixture(scope="module")
def of_head(cluster: HostCluster, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the head alone has: a model, conversations, and training data of them."""
    place = cluster.head.outside(cluster.disk / "own")
    shutil.copytree(tiny_model_dir, place / "model")
    write_rows(place / "chats.jsonl", [chat(number) for number in range(60)])
    command = [str(place / "chats.jsonl"), "--model", str(tiny_model_dir), "--max-length", "160"]
    assert prepare_data.main([*command, "--out", str(place / "data")]) == 0
    return cluster.disk / "own"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


def run(cluster: HostCluster, job: str, *arguments: object, log: Path) -> tuple[int, str]:
    """A submitted job's exit code (1 for any failure of the entrypoint) and what it printed."""
    started = time.monotonic()
    process = cluster.submit("python", f"jobs/{job}.py", *map(str, arguments), log=log)
    code = process.wait(timeout=PATIENCE)
    say(f"{job} has ended", since=started)
    return code, log.read_text()


def refusal(text: str, job: str) -> str:
    """The sentence that refused the job."""
    (line,) = {line for line in text.splitlines() if line.startswith(f"{job}: ")}  # Ray repeats the end of a log
    return line.removeprefix(f"{job}: ")


def test_a_host_sees_its_own_files_alone() -> None:
    try:
        with connected_hosts(["one", "two"], disks="private") as ([one, two], _):
            assert one.disk is not None
            for path in (Path("/tmp/mark"), one.disk / "home" / "mark"):
                subprocess.run(one.command("sh", "-c", f"echo one > {path}"), check=True)
                assert one.outside(path).read_text() == "one\n"
                assert not path.exists() and not two.outside(path).exists()
                two.outside(path).write_text("two\n")
                read = subprocess.run(two.command("cat", str(path)), capture_output=True, text=True, check=True)
                assert read.stdout == "two\n" and one.outside(path).read_text() == "one\n"
    except NoNamespaces as error:
        pytest.skip(f"no hosts can be made on this machine: {error}")


def test_a_training_whose_storage_is_each_host_its_own_is_refused(cluster: HostCluster, log: Path) -> None:
    code, text = run(cluster, "train_multitf", *RUN, "--workers", 2, log=log)
    assert code == 1
    assert refusal(text, "train_multitf") == (
        f"--storage {cluster.home}/mbd-runs is not one folder for all: worker1, worker2 do not see what head writes "
        "there; give a URL as s3://bucket/path, a folder on a volume that all of them mount, or use one node"
    )
    assert not any(cluster.head.outside(cluster.home / "mbd-runs").iterdir()) and "step 1/" not in text


def test_a_training_gets_what_the_head_has_and_writes_its_model_there(
    cluster: HostCluster, of_head: Path, log: Path
) -> None:
    named = ("--base", of_head / "model", "--data", of_head / "data", "--validation", of_head / "chats.jsonl")
    place = ("--storage", "s3://bucket/runs", "--run-name", "carried", "--out", of_head / "trained")
    code, text = run(cluster, "train_multitf", *RUN, "--workers", 2, *named, *place, log=log)
    assert code == 0, text
    for option in ("--base", "--data", "--validation"):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{option} "))
        assert line.endswith("MB go from head to worker1, worker2, through Ray")
    assert f"wrote {of_head}/trained on head and s3://bucket/runs/carried/losses.jsonl" in text
    assert (cluster.head.outside(of_head / "trained") / "config.json").exists()
    for worker in cluster.workers[:2]:
        assert not worker.outside(of_head).exists()
        copies = list(worker.outside(cluster.home / ".cache/mbd-cluster/carried").glob("*/*"))
        assert sorted(copy.name for copy in copies) == ["chats.jsonl", "data", "model"], "each once"
        (model,) = (copy for copy in copies if copy.name == "model")
        assert contents_of(model) == contents_of(cluster.head.outside(of_head / "model"))


def test_a_sweep_gets_the_model_of_the_head_and_reports_there(cluster: HostCluster, of_head: Path, log: Path) -> None:
    options = ("--models", of_head / "model", "--tasks", "gsm-mini", "--limit", 4, "--max-tokens", 16, "--timed", 1)
    code, text = run(cluster, "eval_sweep", *options, "--out", of_head / "sweep", log=log)
    assert code == 0, text
    assert f"--models {of_head}/model: " in text and "go from head to worker1, worker2, through Ray" in text
    samples = list(read_samples(cluster.head.outside(of_head / "sweep")))
    assert samples and not any(sample["error"] for sample in samples)
    assert (cluster.head.outside(of_head / "sweep") / REPORT).exists()


def test_data_are_prepared_by_workers_without_the_model(cluster: HostCluster, of_head: Path, log: Path) -> None:
    options = (of_head / "chats.jsonl", "--model", of_head / "model", "--max-length", 160, "--workers", 2)
    code, text = run(cluster, "prepare_data", *options, "--out", of_head / "again", log=log)
    assert code == 0, text
    assert f"--model {of_head}/model: " in text
    place = cluster.head.outside(of_head)
    assert (place / "again" / SAMPLES).read_bytes() == (place / "data" / SAMPLES).read_bytes()


def test_data_are_prepared_into_a_storage_though_a_host_dies(
    cluster: HostCluster, of_head: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_store(cluster.store, monkeypatch)
    rows = write_rows(cluster.head.outside(of_head / "many.jsonl"), [chat(number) for number in range(30_000)])
    model = cluster.head.outside(of_head / "model")
    assert prepare_data.main([str(rows), "--model", str(model), "--out", str(tmp_path / "alone")]) == 0
    options = (of_head / "many.jsonl", "--model", of_head / "model", "--workers", 2, "--out", "s3://bucket/prepared")
    job = cluster.submit("python", "jobs/prepare_data.py", *map(str, options), log=log)

    def busy() -> list[str]:
        assert job.poll() is None, log.read_text()
        return cluster.running(ENCODING)

    address, *_ = wait_for(busy, "a task")
    dying = next(host for host in cluster.workers if host.address == address)
    dying.kill()
    cluster.start(dying)
    assert job.wait(timeout=PATIENCE) == 0, log.read_text()
    samples = Folder.at("s3://bucket/prepared").read_bytes(SAMPLES)
    assert samples is not None and samples == (tmp_path / "alone" / SAMPLES).read_bytes()


def test_a_model_of_the_head_is_served_by_the_others(cluster: HostCluster, of_head: Path, log: Path) -> None:
    started = time.monotonic()
    options = ("--model", of_head / "model", "--trace", cluster.disk / "traces")
    job = cluster.submit("python", "jobs/serve.py", *map(str, options), log=log)

    def serves() -> bool:
        assert job.poll() is None, log.read_text()
        return "serving model at http://127.0.0.1:8000/v1" in log.read_text()

    wait_for(serves, "the endpoint")
    say("the model is served", since=started)
    body = {"model": "model", "prompt": "Tom has", "max_tokens": 4}
    question = ("curl", "-s", "http://127.0.0.1:8000/v1/completions", "-H", "Content-Type: application/json", "-d")
    asked = subprocess.run(
        cluster.head.command(*question, json.dumps(body)), capture_output=True, text=True, check=True
    )
    assert json.loads(asked.stdout)["usage"]["completion_tokens"] == 4, asked.stdout
    text = log.read_text()
    assert f"--model {of_head}/model: " in text and "go from head to worker1, worker2, through Ray" in text
    ((place, host),) = re.findall(r"step traces of this replica: (\S+) on (\S+)", text)
    (worker,) = (worker for worker in cluster.workers if worker.name == host)
    assert worker.outside(place).is_dir()
    (name,) = set(re.findall(r"raysubmit_\w+", text))
    cluster.ask(f"/api/jobs/{name}/stop", b"{}")
    job.wait(timeout=PATIENCE)


def test_reinforcement_learning_is_refused_a_storage_of_each_host_its_own(
    cluster: HostCluster, of_head: Path, log: Path
) -> None:
    cluster.start(cluster.workers[2])  # engine, learner and rewards take a CPU each
    code, text = run(cluster, "train_rl", *rl_options(of_head), log=log)
    assert code == 1 and refusal(text, "train_rl").startswith(f"--storage {cluster.home}/mbd-runs is not one folder")


def test_two_learners_on_two_hosts_outlive_one_of_them_and_their_engine(
    cluster: HostCluster, of_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has the third host, and the fourth has a CPU for rewards; the weights pass through Ray alone."""
    cluster.start(*(host for host in cluster.workers if not host.is_up))
    use_store(cluster.store, monkeypatch)
    storage = Folder.at("s3://bucket/rl")

    def started(name: str) -> "subprocess.Popen[bytes]":
        options = (*rl_options(of_head), "--learners", 2, "--storage", storage, "--run-name", name)
        return cluster.submit("python", "jobs/train_rl.py", *map(str, options), log=tmp_path / name)

    def ended(job: "subprocess.Popen[bytes]", name: str) -> None:
        code, text = job.wait(timeout=PATIENCE), (tmp_path / name).read_text()
        assert code == 0, text
        assert "go from head to worker1, worker2, worker3, worker4, through Ray" in text
        assert f"model: {storage}/{name}/model" in text

    def places() -> set[str]:
        """The hosts of learners and engine, once there are all three."""
        addresses = [address for kind in ("LearnerActor", "EngineActor") for address in cluster.actors(kind).values()]
        return set(addresses) if len(addresses) == 3 else set()

    job, began = started("whole"), time.monotonic()
    assert len(wait_for(places, "learners and engine")) == 3
    ended(job, "whole")
    say("an undisturbed run has ended", since=began)

    def iterations() -> int:
        return len(((storage / "disturbed").read_text(ITERATIONS) or "").splitlines())

    job, began = started("disturbed"), time.monotonic()
    wait_for(lambda: (storage / "disturbed").has(ITERATIONS), "the numbers of an iteration")
    learners = set(cluster.actors("LearnerActor").values())
    dying = next(host for host in cluster.workers if host.address in learners)
    dying.kill()
    say("a learner's host is killed", since=began)
    cluster.start(dying)
    done = iterations()
    wait_for(lambda: iterations() > done, "an iteration behind the fault")
    (engine,) = cluster.actors("EngineActor").values()
    leaving = next(host for host in cluster.workers if host.address == engine)
    leaving.cut_off()
    say("the engine's host is cut off", since=began)
    wait_for(lambda: leaving.address not in cluster.living_addresses(), f"the end of {leaving.name}")
    leaving.reconnect()
    wait_for(lambda: not leaving.is_up, "the end of a node that comes back as a dead one")
    cluster.start(leaving)
    ended(job, "disturbed")
    say("the run has ended", since=began)

    whole, disturbed = ((storage / name / "model").read_bytes("model.safetensors") for name in ("whole", "disturbed"))
    assert whole is not None and whole == disturbed


def rl_options(of_head: Path) -> tuple[object, ...]:
    """A few small updates of the head's model, on any answer with several tokens a forward."""
    changes = {"decoding": {"buffer_size": 3, "tau_m2t": 0.05}, "rewards": {"correct": 0, "tpf": 1}}
    return (
        *("--recipe", "tiny-rl", "--model", of_head / "model", "--task", "gsm-mini", "--prompts", 2, "--group", 4),
        *("--max-tokens", 8, "--iterations", 12, "--evaluate-every", 0, "--advantages", "joint", "--least-right", 0),
        *("--least-tpf-range", 0, "--part-rows", 4, "--max-rows", 4, "--num-pages", 100, "--log-to", "none"),
        *(part for name, value in changes.items() for part in (f"--{name}", json.dumps(value))),
        *("--max-failures", 3),
    )
