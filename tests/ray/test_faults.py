"""Processes of a serving cluster are killed under load: what clients see, and how long it takes to recover.

Times are printed, not asserted: `pytest tests/ray/test_faults.py -s`.
"""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.slow

MODEL, LIMIT, REPLICAS, GATEWAYS = "faults", 300, 2, 2
ASKED: dict[str, Any] = {
    "model": MODEL,
    "prompt": [9, 9, 9],
    "max_tokens": 150,
    "decoding": {"buffer_size": 1, "tau_m2t": 1.0},  # a token a forward
}


@dataclass
class Load:
    """What the clients of one fault saw: whole and streamed answers that were right, and what was lost of others."""

    streams: int = 0
    resumed: int = 0  # streams among them that were cut and taken up again
    wholes: int = 0
    errors: list[str] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)  # attempts at a stream that ended without an event that says so
    longest_gap: float = 0.0  # seconds between two events of a stream

    def __str__(self) -> str:
        return (
            f"{self.streams} streams ({self.resumed} taken up again) and {self.wholes} whole answers right, "
            f"{len(self.errors)} lost, "
            f"longest gap in a stream {self.longest_gap:.1f} s"
        )


def deploy(model: Path, *, max_waiting: int = 64, request_seconds: float = 600.0) -> None:
    """Serve it, or go on with other arguments, which replaces every replica and gateway."""
    from ray import serve

    from actors.serving.app import application
    from actors.serving.args import ServingArgs

    engine = {"max_rows": 4, "num_pages": 200, "batch_invariant": True}
    served = {"model": str(model), "name": MODEL, "replicas": REPLICAS, "engine": engine, "max_waiting": max_waiting}
    options = {"gateways": GATEWAYS, "retry_seconds": LIMIT, "request_seconds": request_seconds}
    args = ServingArgs.read({"device": "cpu", "models": [served], **options})
    serve.run(application(args), name=MODEL, route_prefix="/faults")


@pytest.fixture(scope="module")
def url(serve_instance: str, tiny_model_dir: Path) -> Iterator[str]:
    from ray import serve

    deploy(tiny_model_dir)
    yield f"{serve_instance}/faults"
    serve.delete(MODEL)


@pytest.fixture(scope="module")
def expected(url: str) -> str:
    """The undisturbed answer; rows are computed by themselves, so every other one is the same."""
    choice = httpx.post(f"{url}/v1/completions", json=ASKED, timeout=LIMIT).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    return str(choice["text"])


@dataclass
class Stream:
    """A stream as its client has it up to the last place that it gave."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    place: dict[str, Any] | None = None

    def follow(self, url: str, load: Load) -> str | None:
        """Read on from there; the whole text, or `None` where the stream is cut."""
        resume = {} if self.place is None else {"resume": self.place | {"token_ids": self.tokens}}
        body = ASKED | {"stream": True, "resumable": True} | resume
        text, tokens, last = self.text, list(self.tokens), time.monotonic()
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT) as response:
            if response.status_code != 200:
                raise KeyError(f"{response.status_code}: {response.read().decode()[:200]}")
            for line in filter(None, response.iter_lines()):
                load.longest_gap, last = max(load.longest_gap, time.monotonic() - last), time.monotonic()
                if line == "data: [DONE]":
                    return text
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    assert event["error"]["code"] == "stream_cut", event
                    return None
                (choice,) = event["choices"]
                text, tokens = text + choice["text"], tokens + choice.get("token_ids", [])
                if "resume" in choice:
                    self.text, self.tokens, self.place = text, tokens, choice["resume"]
        raise KeyError("the stream ended without [DONE]")


def stream_once(url: str, expected: str, load: Load) -> None:
    """One stream, which is taken up again wherever it is cut."""
    stream, num_cuts, deadline = Stream(), 0, time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            text = stream.follow(url, load)
        except (httpx.HTTPError, KeyError) as error:
            load.cuts.append(f"{type(error).__name__}: {error}")
            time.sleep(0.2)
            text = None
        if text is not None:
            assert text == expected, "a stream lost or repeated something"
            load.streams += 1
            load.resumed += num_cuts > 0
            return
        num_cuts += 1
    load.errors.append("a stream was not taken up again")


def ask_once(url: str, expected: str, load: Load) -> None:
    try:
        response = httpx.post(f"{url}/v1/completions", json=ASKED, timeout=LIMIT)
    except httpx.HTTPError as error:
        load.errors.append(f"{type(error).__name__}: {error}")
        return
    if response.status_code == 200:
        assert response.json()["choices"][0]["text"] == expected
        load.wholes += 1
    else:
        load.errors.append(f"{response.status_code}: {response.text[:100]}")


@contextmanager
def under_load(url: str, expected: str) -> Iterator[Load]:
    """Six streams and six whole answers at any time; at the end each has come to its own end."""
    load, ending = Load(), threading.Event()
    failures: list[BaseException] = []

    def client(ask: Callable[[str, str, Load], None]) -> None:
        try:
            while not ending.is_set():
                num_errors = len(load.errors)
                ask(url, expected, load)
                if len(load.errors) > num_errors:
                    time.sleep(0.2)
        except BaseException as error:
            failures.append(error)

    clients = [threading.Thread(target=client, args=(ask,)) for ask in [stream_once] * 6 + [ask_once] * 6]
    for one in clients:
        one.start()
    try:
        yield load
    finally:
        ending.set()
        for one in clients:
            one.join(LIMIT)
    assert not failures, failures
    assert not any(one.is_alive() for one in clients), "a client hangs"


def replicas(url: str) -> list[dict[str, Any]]:
    try:
        (model,) = httpx.get(f"{url}/health", timeout=LIMIT).json()["models"]
    except (httpx.HTTPError, KeyError, ValueError):  # of Serve, or of what stands before it
        return []
    return [one for one in model["replicas"] if one["ready"]]


def processes(name: str) -> set[int]:
    """The pids of this cluster's own processes whose command begins so."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith(name):
                found.add(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it is so."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + LIMIT, f"not so within {LIMIT} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - started


def wait_for_work(load: Load) -> None:
    """Until answers come after the fault too."""
    streams, wholes = load.streams, load.wholes
    wait_until(lambda: load.streams > streams + 1 and load.wholes > wholes + 1, "answers come again")


def test_a_killed_replica_loses_no_request(url: str, expected: str) -> None:
    with under_load(url, expected) as load:
        wait_for_work(load)
        victim = max(replicas(url), key=lambda one: one["running"])["pid"]
        os.kill(victim, signal.SIGKILL)
        seconds = wait_until(
            lambda: len(replicas(url)) == REPLICAS and victim not in {one["pid"] for one in replicas(url)},
            "the replica is replaced",
        )
        wait_for_work(load)
    print(f"\nreplica killed: {load}; all replicas ready again after {seconds:.1f} s")
    assert load.errors == []


def test_all_replicas_killed_lose_no_request(url: str, expected: str) -> None:
    with under_load(url, expected) as load:
        wait_for_work(load)
        victims = {one["pid"] for one in replicas(url)}
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        seconds = wait_until(
            lambda: len(replicas(url)) == REPLICAS and not victims & {one["pid"] for one in replicas(url)},
            "the replicas are replaced",
        )
        wait_for_work(load)
    print(f"\nall replicas killed: {load}; all ready again after {seconds:.1f} s")
    assert load.errors == []


def test_a_redeployment_cuts_nothing(url: str, expected: str, tiny_model_dir: Path) -> None:
    """Other arguments replace every engine and every gateway; each ends after its requests."""
    before = {one["pid"] for one in replicas(url)} | processes(f"ray::ServeReplica:{MODEL}:Gateway")
    started = time.monotonic()
    with under_load(url, expected) as load:
        wait_for_work(load)
        deploy(tiny_model_dir, max_waiting=65, request_seconds=500.0)
        wait_until(lambda: not before & processes(f"ray::ServeReplica:{MODEL}"), "all are replaced")
        wait_until(lambda: len(replicas(url)) == REPLICAS, "the new ones serve")
        seconds = time.monotonic() - started
        wait_for_work(load)
    print(f"\nredeployed: {load}; every process was another one after {seconds:.1f} s")
    assert load.errors == []


def test_a_killed_controller_loses_no_request(url: str, expected: str) -> None:
    (victim,) = processes("ray::ServeController")
    with under_load(url, expected) as load:
        wait_for_work(load)
        os.kill(victim, signal.SIGKILL)
        wait_for_work(load)
        seconds = wait_until(lambda: len(processes("ray::ServeController") - {victim}) == 1, "it is replaced")
        wait_for_work(load)
    print(f"\ncontroller killed: {load}; a new one runs after {seconds:.1f} s")
    assert load.errors == []


def test_a_killed_gateway_loses_nothing(url: str, expected: str) -> None:
    """What it had not begun to answer goes to the other one; its streams end with an error and are taken up there."""
    name, kills = f"ray::ServeReplica:{MODEL}:Gateway", 0
    with under_load(url, expected) as load:
        while load.resumed == 0 and kills < 5:  # until one had streams under way
            wait_for_work(load)
            gateways, kills = processes(name), kills + 1
            assert len(gateways) == GATEWAYS
            os.kill(next(iter(gateways)), signal.SIGKILL)
            wait_for_work(load)
            seconds = wait_until(lambda old=gateways: len(processes(name) - old) == 1, "it is replaced")  # type: ignore[misc]
        wait_for_work(load)
    print(f"\n{kills} gateways killed: {load}; a new one runs after {seconds:.1f} s")
    assert load.errors == [] and load.cuts == []
    assert load.resumed > 0, "no stream was under way at any of the gateways"


def test_a_killed_proxy_cuts_all_connections_and_comes_back(url: str, expected: str) -> None:
    (victim,) = processes("ray::ProxyActor")
    with under_load(url, expected) as load:
        wait_for_work(load)
        os.kill(victim, signal.SIGKILL)
        seconds = wait_until(lambda: len(replicas(url)) == REPLICAS, "the endpoint answers again")
        wait_for_work(load)
        num_errors = len(load.errors)
        wait_for_work(load)
    print(Counter(one[:60] for one in load.errors).most_common(5))
    print(f"\nproxy killed: {load}; the endpoint answers again after {seconds:.1f} s")
    assert num_errors > 0
    assert len(load.errors) == num_errors
