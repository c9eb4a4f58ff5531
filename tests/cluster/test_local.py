"""Ray on this machine: a start that fails is one sentence, and leaves no process behind."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from session_processes import check_loopback_only, living_with

from cluster import local


def processes_of_session(leader: int) -> list[str]:
    """The living processes of the session that `leader` leads."""
    living = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _parent, _group, session = rest.split()[:4]
        if int(session) == leader and state != "Z":
            living.append(name)
    return living


def test_a_cluster_that_takes_no_job_in_time_is_one_sentence_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads: list[subprocess.Popen[bytes]] = []
    folders: list[Path] = []
    popen = subprocess.Popen

    def start(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        heads.append(popen(command, **settings))
        folders.append(Path(next(a for a in command if a.startswith("--temp-dir=")).partition("=")[2]))
        return heads[-1]

    def no_answer(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("no answer")

    monkeypatch.setattr(local.subprocess, "Popen", start)
    monkeypatch.setattr(local.urllib.request, "urlopen", no_answer)
    sentence = r"^the local Ray cluster took no job within 6 s; its log ends: .*$"
    with pytest.raises(RuntimeError, match=sentence) as raised, local.local_cluster(start_seconds=6):
        pytest.fail("the block must not be entered")
    assert "\n" not in str(raised.value)
    assert len(heads) == 1
    assert heads[0].poll() is not None
    deadline = time.monotonic() + 60
    while processes_of_session(heads[0].pid) and time.monotonic() < deadline:  # those that were killed are ending
        time.sleep(0.05)
    assert not processes_of_session(heads[0].pid)
    assert not folders[0].exists()


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without a connection, whatever ran before; what `connect` sets for Ray is taken back."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(local.GCS_SECONDS, "10")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return monkeypatch


def test_ray_is_started_without_spaces_and_long_paths_which_it_cannot_take(
    unconnected: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray splits its workers' commands at spaces, and its sockets' paths have 107 bytes."""
    environment, folder = tmp_path / "an environment", tmp_path / ("t" * 120)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120)
    folder.mkdir()
    said = tmp_path / "said"
    script = (
        "import os, sys, tempfile\n"
        f"print(sys.executable, sys.prefix, tempfile.gettempdir(), sep='\\n', file=open({str(said)!r}, 'w'))"
    )
    unconnected.setattr(sys, "prefix", str(environment))
    unconnected.setattr(local, "RAY_START", (str(environment / "bin" / "python"), "-c", script))
    unconnected.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(RuntimeError):
        local.connect()
    executable, prefix, temporary = said.read_text().split("\n")[:3]
    assert executable == f"{prefix}/bin/python" and " " not in executable
    assert len(temporary) < 40 and Path(temporary).parent == Path(prefix).parent


def test_ray_s_files_lie_where_this_user_can_write(unconnected: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unconnected.setattr(local, "SESSION_PLACES", (str(tmp_path / "none"), str(tmp_path)))
    assert local._session_folder().parent == tmp_path
    unconnected.setattr(local, "SESSION_PLACES", (str(tmp_path / "none"), "/nowhere"))
    with pytest.raises(RuntimeError, match=r"none: No such file or directory; /nowhere: No such file"):
        local.connect()


def test_a_ray_that_does_not_start_is_one_sentence(unconnected: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out\nduring startup.")

    unconnected.setattr(ray, "init", fail)
    sentence = "no Ray cluster could be started on this machine, twice: The current node timed out during startup."
    with pytest.raises(RuntimeError) as raised:
        local.start_ray()
    assert str(raised.value) == sentence


def test_a_ray_that_does_not_start_is_started_once_more(unconnected: pytest.MonkeyPatch) -> None:
    starts: list[str] = []

    def init(address: str, **_: Any) -> None:
        starts.append(address)
        if len(starts) == 1:
            raise Exception("The current node timed out during startup.")

    unconnected.setattr(ray, "init", init)
    local.start_ray()
    assert starts == ["local", "local"]


def test_an_own_ray_that_ends_while_it_starts_is_started_once_more(
    unconnected: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first head ends, the second is up."""
    script = "import sys, time; from pathlib import Path; first = Path(sys.argv[1], 'first'); "
    script += "first.exists() or (first.touch(), sys.exit('no node')); folder = sys.argv[-1].partition('=')[2]; "
    script += "Path(folder, 'ray_current_cluster').write_text('10.0.0.1:6379'); time.sleep(600)"
    joined: list[str] = []

    def fail(address: str, **_: Any) -> None:
        joined.append(address)
        raise ConnectionError("no answer")

    unconnected.setenv(local.TOKEN_PATH, "")
    unconnected.setattr(local, "RAY_START", (sys.executable, "-c", script, str(tmp_path)))
    unconnected.setattr(ray, "init", fail)
    with pytest.raises(RuntimeError, match=r"^the local Ray cluster started and does not answer: no answer$"):
        local.connect(start_seconds=60)
    assert (tmp_path / "first").exists() and joined == ["10.0.0.1:6379"]  # both heads were started
    assert not living_with(str(tmp_path))


def test_a_long_wait_shows_that_it_is_alive_and_a_short_one_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ALIVE_LOG_SECONDS", 0.2)
    with local.progress_line("starting Ray"):
        pass
    assert capsys.readouterr().err == ""
    with local.progress_line("starting Ray"):
        time.sleep(0.5)
    assert re.fullmatch(r"(starting Ray \.\.\. \d s\n)+", capsys.readouterr().err)


def test_what_workers_print_is_shown_as_it_is_and_the_rest_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    worker = {"pid": 7, "actor_name": "RayTrainWorker"}
    local._take_lines({**worker, "is_err": False, "lines": ["step 1/4", "step 2/4"]})
    local._take_lines({**worker, "is_err": True, "lines": ["Setting up process group"]})
    local._take_lines({"pid": "autoscaler", "is_err": False, "lines": ["Resized to 8 CPUs"]})
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("step 1/4\nstep 2/4\n", "")
    kept = "(RayTrainWorker) Setting up process group\n(autoscaler) Resized to 8 CPUs\n"
    assert local.ray_lines().endswith(kept)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "import time; print('booting', flush=True); time.sleep(600)",
            r"did not start within 3 s; its log ends: (booting|\(it is empty\))",
        ),
        ("raise SystemExit('no more\\ndescriptors')", "ended with exit code 1; its log ends: descriptors"),
    ],
    ids=["hangs", "fails"],
)
def test_an_own_ray_that_does_not_start_is_one_sentence_and_leaves_no_process(
    unconnected: pytest.MonkeyPatch, tmp_path: Path, script: str, sentence: str
) -> None:
    unconnected.setattr(local, "RAY_START", (sys.executable, "-c", script, str(tmp_path)))
    unconnected.setattr(ray, "init", lambda *_, **__: pytest.fail("there is nothing to connect to"))
    with pytest.raises(RuntimeError) as raised:
        local.connect(start_seconds=3)
    assert re.fullmatch(f"the local Ray cluster {sentence}", str(raised.value))
    assert not living_with(str(tmp_path))


def test_an_own_ray_that_cannot_be_connected_to_leaves_no_process(
    unconnected: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    up = "import sys, time; from pathlib import Path; folder = Path(sys.argv[-1].partition('=')[2]); "
    up += "(folder / 'ray_current_cluster').write_text('10.0.0.1:6379'); time.sleep(600)"

    def fail(address: str, **_: Any) -> None:
        assert address == "10.0.0.1:6379"
        raise ConnectionError("no\nanswer")

    unconnected.setenv(local.TOKEN_PATH, "")
    unconnected.setattr(local, "RAY_START", (sys.executable, "-c", up, str(tmp_path)))
    unconnected.setattr(ray, "init", fail)
    with pytest.raises(RuntimeError, match=r"no answer$"):
        local.connect(start_seconds=60)
    assert not living_with(str(tmp_path))


DRIVER = """
import os, time
import ray
from cluster.local import TOKEN_PATH, connect

connect(num_cpus=2, worker_logs=False)

@ray.remote
def busy():
    print("busy", flush=True)
    open(os.environ["BUSY"] + str(os.getpid()), "w").close()
    while True:
        pass

tasks = [busy.remote() for _ in range(2)]
while len([n for n in os.listdir(os.path.dirname(os.environ["BUSY"]))]) < 2:
    time.sleep(0.1)
print(os.path.dirname(os.environ[TOKEN_PATH]), flush=True)
time.sleep(600)
"""


def test_a_killed_driver_leaves_no_process_of_its_ray(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env={**environment, "BUSY": str(tmp_path / "busy-")},
        cwd=local.ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        folder = driver.stdout.readline().strip()
        assert Path(folder).is_dir()
        workers = [int(path.name.partition("-")[2]) for path in tmp_path.iterdir()]
        assert len(workers) == 2
        assert len(living_with(folder)) > 3
        check_loopback_only(folder)
    finally:
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (living_with(folder) or Path(folder).exists()):
        time.sleep(0.1)
    assert not living_with(folder)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not Path(folder).exists()


def test_an_address_that_does_not_answer_is_named_in_bounded_time(unconnected: pytest.MonkeyPatch) -> None:
    unconnected.setattr(ray, "init", lambda *_, **__: pytest.fail("ray.init would try for minutes"))
    with socket.create_server((local.LOOPBACK, 0)) as silent:
        address = f"{local.LOOPBACK}:{silent.getsockname()[1]}"
        unconnected.setenv("RAY_ADDRESS", address)
        with pytest.raises(RuntimeError) as raised:
            local.connect(answer_seconds=5)
    assert str(raised.value) == f"the Ray cluster at RAY_ADDRESS={address} does not answer within 5 s"


def test_the_time_to_answer_begins_when_the_question_is_asked(unconnected: pytest.MonkeyPatch) -> None:
    """On a busy machine the child that asks takes longer to start than a cluster may take to answer."""
    unconnected.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    unconnected.setattr(ray, "init", lambda *_, **__: None)
    unconnected.setattr(local, "ASK", "import time; time.sleep(3); print(flush=True)")
    assert local.connect(answer_seconds=2)


def test_an_address_without_a_cluster_is_named(unconnected: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    unconnected.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    unconnected.setattr(local, "check_answer", lambda *_, **__: None)
    unconnected.setattr(ray, "init", fail)
    with pytest.raises(RuntimeError, match=r"10.0.0.1:6379"):
        local.connect()


def test_auto_beside_a_second_cluster_is_refused_and_names_both(
    unconnected: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes that look like two clusters' raylets, by which Ray finds the clusters of a machine."""
    script = "import sys, time; print(flush=True); time.sleep(600)"
    addresses = ["127.0.0.1:1041", "127.0.0.1:1042"]
    joined: list[str] = []
    unconnected.setattr(ray, "init", lambda address, **_: joined.append(address))
    unconnected.setattr(local, "check_answer", lambda *_, **__: None)
    unconnected.setenv("RAY_ADDRESS", "auto")
    raylets = []
    try:
        for address in addresses:
            command = ["/tmp/raylet", "-c", script, f"--gcs-address={address}"]
            child = subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE)
            raylets.append(child)
            assert child.stdout is not None
            child.stdout.readline()
        with pytest.raises(ValueError, match="RAY_ADDRESS=auto") as refused:
            local.connect()
        assert all(address in str(refused.value) for address in addresses)
        assert "\n" not in str(refused.value)
        assert joined == []
    finally:
        for child in raylets:
            child.kill()
            child.wait()
    unconnected.setenv("RAY_ADDRESS", addresses[1])
    assert local.connect()
    assert joined == [addresses[1]]
    assert capsys.readouterr().err == f"on the Ray cluster at {addresses[1]}\n"


def test_a_dashboard_as_the_address_is_told_what_it_is_for(unconnected: pytest.MonkeyPatch) -> None:
    unconnected.setattr(ray, "init", lambda *_, **__: pytest.fail("there is nothing to join"))
    unconnected.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(ValueError, match="dashboard"):
        local.connect()


UV_JOB = """
import os, sys
import ray
from cluster.local import connect

connect(num_cpus=1, worker_logs=False)
print(*ray.get(ray.remote(num_cpus=1)(lambda: (os.getcwd(), sys.executable, os.environ["no_proxy"])).remote()))
"""


@pytest.mark.slow
def test_uv_run_behind_a_dead_proxy_gives_workers_the_same_environment_and_folder(tmp_path: Path) -> None:
    """A process with the command line of `uv run job.py`, by which Ray knows uv, and the job as its child.

    Neither Ray nor its workers ask the proxy for this machine.
    """
    (tmp_path / "run").write_text(f"import subprocess; exit(subprocess.call([{sys.executable!r}, 'job.py']))")
    (tmp_path / "job.py").write_text(UV_JOB)
    dead = dict.fromkeys(("http_proxy", "HTTPS_PROXY", "all_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    other = ("RAY_ADDRESS", local.WORKERS_BY_UV)
    environment = {k: v for k, v in os.environ.items() if k not in other and not k.lower().endswith("_proxy")}
    done = subprocess.run(
        ["uv", "run", "job.py"],
        executable=sys.executable,
        cwd=tmp_path,
        env=environment | dead | {"PYTHONPATH": str(local.ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    folder, executable, direct = done.stdout.split()
    assert (folder, executable) == (str(tmp_path), sys.executable)
    assert direct.startswith("localhost,127.0.0.1,::1")


def test_uv_run_on_another_cluster_says_what_ray_does(
    unconnected: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unconnected.setattr(ray, "init", lambda *_, **__: None)
    unconnected.setattr(local, "check_answer", lambda *_, **__: None)
    unconnected.setattr(local, "starts_workers_by_uv", lambda: True)
    unconnected.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert local.connect()
    assert "RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 workers have" in capsys.readouterr().err


def test_another_cluster_than_the_connected_one_is_refused(unconnected: pytest.MonkeyPatch) -> None:
    unconnected.setattr(ray, "is_initialized", lambda: True)
    unconnected.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    joined = SimpleNamespace(gcs_address="10.0.0.1:6379")
    unconnected.setattr(ray, "get_runtime_context", lambda: joined)
    for same in (None, "10.0.0.1:6379", "127.0.0.1:6379", "localhost:6379"):
        assert not local.connect(address=same)
    for other in ("10.0.0.2:6379", "10.0.0.1:6380", "local"):
        with pytest.raises(ValueError, match=f"connected to the Ray cluster at 10.0.0.1:6379, so cluster={other} "):
            local.connect(address=other)
    unconnected.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert not local.connect(), "a connection that the caller made goes before the variable"


TWICE = """
import os
import ray
from cluster.local import AUTH_MODE, TOKEN_PATH, connect, disconnect

for _ in range(2):
    assert connect(address="local", num_cpus=1, worker_logs=False)
    print(os.path.dirname(os.environ[TOKEN_PATH]), ray.get(ray.remote(lambda: os.getpid()).remote()), flush=True)
    disconnect()
    assert not ray.is_initialized() and not {TOKEN_PATH, AUTH_MODE} & os.environ.keys()
    input()
"""


@pytest.mark.slow
def test_a_cluster_that_a_call_started_ends_with_it_and_another_may_follow() -> None:
    names = ("RAY_ADDRESS", local.TOKEN_PATH, local.AUTH_MODE)
    environment = {name: value for name, value in os.environ.items() if name not in names}
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TWICE], env=environment, cwd=local.ROOT, **piped) as caller:
        assert caller.stdin is not None and caller.stdout is not None
        for _ in range(2):
            folder, pid = caller.stdout.readline().split()
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and (living_with(folder) or Path(folder).exists()):
                time.sleep(0.1)
            assert not living_with(folder) and not Path(folder).exists() and not Path(f"/proc/{pid}").exists()
            caller.stdin.write("\n")
            caller.stdin.flush()
    assert caller.returncode == 0
