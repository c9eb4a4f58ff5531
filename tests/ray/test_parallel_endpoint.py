"""The endpoint over two tensor-parallel ranks: it answers as over one, and comes back when a rank is lost."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL = "two-ranks"
LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"not so within {LIMIT} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def url(serve_instance: str, tiny_model_dir: Path) -> Iterator[str]:
    from ray import serve

    from actors.serving.app import application
    from actors.serving.args import ServingArgs

    engine = {"max_rows": 4, "num_pages": 200}
    model = {"model": str(tiny_model_dir), "name": MODEL, "engine": engine, "tensor_parallel": 2}
    args = ServingArgs.read({"device": "cpu", "retry_seconds": LIMIT, "models": [model]})
    serve.run(application(args), name=MODEL, route_prefix="/two")
    yield f"{serve_instance}/two"
    last = follower_pids()
    serve.delete(MODEL)
    assert last
    wait_until(lambda: not last & follower_pids(), "the followers end with their replica")


def follower_pids() -> set[int]:
    """The followers that descend from this process, and so are of its own cluster."""
    parents, followers = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(folder.name)] = int(parent)
        if b"mbd_core.engine.parallel.followers" in command and state != "Z":
            followers.add(int(folder.name))

    def ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return {pid for pid in followers if ours(pid)}


def complete(url: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [9, 9, 9], "max_tokens": 40} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT)


def health(url: str) -> dict[str, Any]:
    """What `/health` says of the first replica that answers it."""
    body = httpx.get(f"{url}/health", timeout=LIMIT).json()
    replicas = [one for one in body["models"][0]["replicas"] if "error" not in one]
    return dict(replicas[0]) if replicas else {"ready": False, "running": 0, "waiting": 0}


def test_two_ranks_answer_as_one(url: str, tiny_model_dir: Path) -> None:
    from mbd_core.checkpoint.chat import decode_text
    from mbd_core.decoding.blocks.request import Request
    from mbd_core.engine.config import EngineConfig
    from mbd_core.serving.tokens.load import load_engine

    loaded = load_engine(tiny_model_dir, EngineConfig(max_rows=1, num_pages=64))
    for fields in ({}, {"buffer_size": 1, "tau_m2t": 0.3}, {"t2t": {"tau": 0.5}}):
        request = Request(request_id="r", prompt=(9, 9, 9), max_tokens=40, decoding=loaded.decoding(fields))
        (alone,) = loaded.engine.generate([request])
        answer = complete(url, decoding=fields).json()
        assert "choices" in answer, answer
        assert answer["choices"][0]["text"] == decode_text(loaded.tokenizer, alone.tokens)
        assert answer["usage"]["completion_tokens"] == len(alone.tokens) > 10
        assert answer["mbd"]["num_forwards"] == alone.counts.num_forwards
    state = health(url)
    assert (state["tensor_parallel"], state["ready"]) == (2, True)
    assert state["backend"] == "torch cpu float32, tensor parallel over 2 ranks"
    assert state["rank_sums"] == {"name": "gloo", "not_chosen": {"shared memory": "needs CUDA devices"}}


@pytest.mark.slow
def test_requests_outlive_a_killed_follower_and_the_replica_is_replaced(url: str) -> None:
    """The follower is stopped before it is killed: rank 0's step waits for it, so no request can end before."""
    wanted = complete(url).json()["choices"]
    (follower,) = follower_pids()
    os.kill(follower, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(complete, url) for _ in range(2)]
        wait_until(lambda: num_requests(url) == 2, "both requests have come to the engine")
        assert not any(p.done() for p in pending)
        os.kill(follower, signal.SIGKILL)
        killed = time.monotonic()
        answers = [p.result() for p in pending]
        answered = time.monotonic() - killed
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == wanted
    wait_until(lambda: health(url)["ready"] and len(follower_pids() - {follower}) == 1, "the replica is replaced")
    print(f"\nrank killed: both answers after {answered:.1f} s, ready again after {time.monotonic() - killed:.1f} s")
    assert complete(url).json()["choices"] == wanted
    assert follower not in follower_pids() and len(follower_pids()) == 1


def num_requests(url: str) -> int:
    state = health(url)
    return int(state["running"] + state["waiting"])
