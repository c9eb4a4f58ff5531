"""Ray on this machine: a start that fails is one sentence, and leaves no process behind."""

import subprocess
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import ray

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


def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out\nduring startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(local.GCS_SECONDS, "10")  # `start_ray` sets both for Ray; here they are taken back
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(RuntimeError, match=r"machine: The current node timed out during startup\.$"):
        local.connect()


def test_an_address_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(
        RuntimeError, match=r"RAY_ADDRESS=10\.0\.0\.1:6379 does not answer: Could not find any running"
    ):
        local.connect()
