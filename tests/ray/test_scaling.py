"""Replicas that come and go: the first of none at a request and to none again, a second one at a load of KV memory."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

APP, MODEL = "scaling", "tiny"
LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is


@contextmanager
def served(at: str, model: Path, *, replicas: dict[str, Any], **engine: int) -> Iterator[str]:
    """The URL of an application with one model, which is deleted after the block."""
    from ray import serve

    from actors.serving.app import build

    given = {"model": str(model), "name": MODEL, "replicas": replicas, "engine": {"num_pages": 100, **engine}}
    serve.run(build({"device": "cpu", "models": [given]}), name=APP, route_prefix=f"/{APP}")
    try:
        yield f"{at}/{APP}"
    finally:
        serve.delete(APP)


@pytest.mark.slow
def test_a_model_goes_to_no_replica_and_back_though_its_health_is_asked_for_all_the_time(
    serve_instance: str, tiny_model_dir: Path
) -> None:
    scaling = {"min": 0, "max": 2, "window_seconds": 11, "up_seconds": 0, "down_seconds": 1}
    with served(serve_instance, tiny_model_dir, replicas=scaling) as url:
        ended = threading.Event()
        watch = threading.Thread(target=probe, args=(url, ended, seen := []))
        watch.start()
        try:
            for _ in range(2):
                wait_for(url, replicas=0)
                assert httpx.get(f"{url}/v1/models", timeout=LIMIT).json()["data"][0]["id"] == MODEL
                assert complete(url, max_tokens=8) == 200
                wait_for(url, replicas=1)
        finally:
            ended.set()
            watch.join()
        assert set(seen) == {200}, "the application is ready throughout"


@pytest.mark.slow
def test_a_load_of_kv_memory_starts_a_second_replica_which_goes_again(
    serve_instance: str, tiny_model_dir: Path
) -> None:
    """There are fewer requests than one replica's target: their memory alone asks for another."""
    clients = 6
    scaling = {"min": 1, "max": 2, "target_requests": 100, "target_kv_load": 0.3, "window_seconds": 11}
    scaling |= {"up_seconds": 0, "down_seconds": 1}
    with served(serve_instance, tiny_model_dir, replicas=scaling, max_rows=2, page_size=32, num_pages=16) as url:
        wait_for(url, replicas=1)
        ended = threading.Event()

        def keep_asking() -> set[int]:
            answers = set()
            while not ended.is_set():
                answers.add(complete(url, max_tokens=100))
            return answers

        with ThreadPoolExecutor(clients) as pool:
            asking = [pool.submit(keep_asking) for _ in range(clients)]
            try:
                wait_for(url, replicas=2)
            finally:
                ended.set()
            assert [one.result() for one in asking] == [{200}] * clients
        wait_for(url, replicas=1)


def complete(url: str, *, max_tokens: int) -> int:
    """The status of an answer that takes a forward a token."""
    body = {"model": MODEL, "prompt": "Tom has 12 pens.", "max_tokens": max_tokens}
    body |= {"decoding": {"buffer_size": 1, "tau_m2t": 1.0}}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT).status_code


def probe(url: str, ended: threading.Event, seen: list[int]) -> None:
    """Ask for the health five times a second, as the probes of a load balancer and of Kubernetes do."""
    while not ended.wait(0.2):
        seen.append(httpx.get(f"{url}/health", timeout=LIMIT).status_code)


def wait_for(url: str, *, replicas: int) -> None:
    deadline = time.monotonic() + LIMIT
    while len(found(url)) != replicas:
        assert time.monotonic() < deadline, f"there are {found(url)}, not {replicas} replicas"
        time.sleep(0.2)


def found(url: str) -> list[dict[str, Any]]:
    """The replicas of the only model."""
    replicas: list[dict[str, Any]] = httpx.get(f"{url}/health", timeout=LIMIT).json()["models"][0]["replicas"]
    return replicas
