"""A model without replicas: it is listed and healthy, its first request starts one, and the last one goes again."""

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

APP, MODEL = "zero", "tiny"
LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is


@pytest.mark.slow
def test_a_model_goes_to_no_replica_and_back_though_its_health_is_asked_for_all_the_time(
    serve_instance: str, tiny_model_dir: Path
) -> None:
    from ray import serve

    from actors.app import build
    from actors.serving_args import ServingArgs

    url = f"{serve_instance}/{APP}"
    scaling = {"min": 0, "max": 2, "window_seconds": 11, "up_seconds": 0, "down_seconds": 1}
    model = {"model": str(tiny_model_dir), "name": MODEL, "replicas": scaling, "engine": {"num_pages": 100}}
    serve.run(
        build(ServingArgs.model_validate({"device": "cpu", "models": [model]})), name=APP, route_prefix=f"/{APP}"
    )
    try:
        ended = threading.Event()
        watch = threading.Thread(target=probe, args=(url, ended, seen := []))
        watch.start()
        try:
            for _ in range(2):
                wait_for(url, replicas=0)
                assert httpx.get(f"{url}/v1/models", timeout=LIMIT).json()["data"][0]["id"] == MODEL
                body = {"model": MODEL, "prompt": "Tom has 12 pens.", "max_tokens": 8}
                answered = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT)
                assert answered.status_code == 200, answered.text
                wait_for(url, replicas=1)
        finally:
            ended.set()
            watch.join()
        assert set(seen) == {200}, "the application is ready throughout"
    finally:
        serve.delete(APP)


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
