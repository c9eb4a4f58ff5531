"""The endpoint over two tensor-parallel ranks: it answers as over one, and comes back when a rank is lost."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL = "two-ranks"


@pytest.fixture(scope="module")
def url(serve_instance: str, tiny_model_dir: Path) -> Iterator[str]:
    from ray import serve

    from actors.endpoint import EndpointArgs, build
    from mbd_core.engine.engine import EngineConfig

    engine = EngineConfig(max_rows=4, num_pages=200)
    serve.run(
        build(EndpointArgs(folder=str(tiny_model_dir), name=MODEL, engine=engine, tensor_parallel=2)),
        name=MODEL,
        route_prefix="/two",
    )
    yield f"{serve_instance}/two"
    last = follower_pids()
    serve.delete(MODEL)
    assert last and not (last & follower_pids()), "the followers end with their replica"


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
        if b"mbd_core.parallel.followers" in command and state != "Z":
            followers.add(int(folder.name))

    def ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return {pid for pid in followers if ours(pid)}


def complete(url: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [9, 9, 9], "max_tokens": 40} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def health(url: str) -> dict[str, Any]:
    response = httpx.get(f"{url}/health", timeout=30)
    return dict(response.json()) if response.headers["content-type"] == "application/json" else {"ready": False}


def test_two_ranks_answer_as_one(url: str, tiny_model_dir: Path) -> None:
    from mbd_core.decoding.request import Request
    from mbd_core.engine.engine import EngineConfig
    from mbd_core.serving.load import load_engine

    loaded = load_engine(tiny_model_dir, EngineConfig(max_rows=1, num_pages=64))
    for fields in ({}, {"buffer_size": 1, "tau_m2t": 0.3}, {"t2t": {"tau": 0.5}}):
        request = Request(request_id="r", prompt=(9, 9, 9), max_tokens=40, decoding=loaded.decoding(fields))
        (alone,) = loaded.engine.generate([request])
        told = complete(url, decoding=fields).json()
        assert told["choices"][0]["text"] == loaded.tokenizer.decode(alone.tokens, skip_special_tokens=True)
        assert told["usage"]["completion_tokens"] == len(alone.tokens) > 10
        assert told["mbd"]["num_forwards"] == alone.counts.num_forwards
    state = health(url)
    assert (state["tensor_parallel"], state["ready"]) == (2, True)
    assert state["backend"] == "torch cpu float32, tensor parallel over 2 ranks"


def test_a_killed_follower_is_a_500_and_the_replica_is_replaced(url: str) -> None:
    before = complete(url).json()["choices"]
    (follower,) = follower_pids()
    slow = {"n": 40, "max_tokens": 400, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}}
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(complete, url, **slow)
        while health(url)["running"] == 0:
            assert not pending.done(), "the request ended before it was seen to run"
        os.kill(follower, signal.SIGKILL)
        lost = pending.result()
    for refused in (lost, complete(url)):
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "engine_failed"
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    assert not health(url)["ready"]
    deadline = time.monotonic() + 60
    while not health(url)["ready"]:
        assert time.monotonic() < deadline, "the replica was not replaced"
        time.sleep(0.2)
    assert complete(url).json()["choices"] == before
    assert follower not in follower_pids() and len(follower_pids()) == 1
