"""Operations over HTTP on Serve: orders reach every replica, and the measures stand on one page."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mbd_core.serving.api.orders import ORDERS

MODEL, APP, LIMIT = "operated", "operated", 300
ADMIN, CLIENT = "ann-0123456789abcdef", "ben-0123456789abcdef"


@pytest.fixture(scope="module")
def client(
    serve_instance: str, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    from ray import serve

    from actors.serving.app import application
    from actors.serving.args import ServingArgs

    keys = tmp_path_factory.mktemp("secrets") / "keys"
    keys.write_text(f"ann {ADMIN} administrator\nben {CLIENT}\n")
    engine = {"max_rows": 2, "num_pages": 100}
    model = {"model": str(tiny_model_dir), "name": MODEL, "replicas": 2, "engine": engine}
    args = ServingArgs.read({"device": "cpu", "models": [model], "api_keys": str(keys)})
    serve.run(application(args), name=APP, route_prefix=f"/{APP}")
    with httpx.Client(base_url=f"{serve_instance}/{APP}", headers=authorized(ADMIN), timeout=LIMIT) as connected:
        yield connected
    serve.delete(APP)


def authorized(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/completions", json={"model": MODEL, "prompt": [9, 9, 9], "max_tokens": 8})


def replicas(client: httpx.Client) -> list[dict[str, Any]]:
    (model,) = client.get("/health").json()["models"]
    states: list[dict[str, Any]] = model["replicas"]
    return states


def test_orders_reach_every_replica(client: httpx.Client, tiny_model_dir: Path) -> None:
    done = client.post("/update_weights", json={"folder": str(tiny_model_dir), "version": 3})
    assert done.json() == {"folder": str(tiny_model_dir), "version": 3, "replicas": 2}
    assert [state["weights"]["version"] for state in replicas(client)] == [3, 3]
    assert ask(client).json()["mbd"]["newest_weights"] == 3
    refused = client.post("/update_weights", json={"folder": str(tiny_model_dir / "nowhere")})
    assert refused.status_code == 409 and "nowhere" in refused.json()["error"]["message"]

    slept = client.post("/sleep", json={})
    assert slept.status_code == 200 and slept.json()["replicas"] == 2 and slept.json()["freed_bytes"] > 0
    assert [state["asleep"] for state in replicas(client)] == [True, True]
    answer, ready = ask(client), client.get("/ready")
    assert (answer.status_code, ready.status_code) == (503, 503) and answer.headers["retry-after"]
    assert client.post("/wakeup").json() == {"asleep": False, "replicas": 2}
    assert client.post("/abort_requests").json() == {"aborted": 0, "replicas": 2}
    assert ask(client).status_code == 200


def test_the_measures_stand_on_one_page(client: httpx.Client) -> None:
    assert ask(client).status_code == 200
    deadline = time.monotonic() + LIMIT
    while "ray_mbd_committed_tokens_total{" not in (page := client.get("/metrics")).text:
        assert page.status_code == 200 and time.monotonic() < deadline, page.text
        time.sleep(1)
    lines = [line for line in page.text.splitlines() if not line.startswith("#")]
    assert lines and all(line.startswith("ray_mbd_") and f'application="{APP}"' in line for line in lines)


def test_who_is_no_administrator_orders_nothing(client: httpx.Client) -> None:
    for path in (*ORDERS, "/metrics"):
        method = "GET" if path == "/metrics" else "POST"
        for headers, status in ((authorized(CLIENT), 403), (authorized("nobody-0123456789"), 401), ({}, 401)):
            answer = httpx.request(method, f"{client.base_url}{path.lstrip('/')}", headers=headers, timeout=LIMIT)
            assert answer.status_code == status, f"{path}: {answer.text}"
