"""Weights and adapters change under load: no replica is restarted and every stream ends whole."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from adapter_folders import write_adapter
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from mbd_core.checkpoint.config import load_config
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.checkpoint.tokenizer import load_tokenizer

MODEL, ADAPTER, LIMIT, STREAMS = "swapped", "tuned", 300, 4


@pytest.fixture(scope="module")
def other_weights(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "other"
    model = load_model(tiny_model_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    save_model(folder, model, tokenizer=load_tokenizer(tiny_model_dir, model.config), generation={"tau_m2t": 0.9})
    return folder


class Deployer:
    """`serve deploy` of one model, whose content changes."""

    def __init__(self, dashboard_url: str, model: Path) -> None:
        self._client, self._model = ServeSubmissionClient(dashboard_url), model

    def __call__(self, weights: Path | None = None, adapters: dict[str, str] | None = None) -> None:
        content = {"weights": None if weights is None else str(weights), "adapters": adapters or {}}
        self.contents(content, {"adapters": {MODEL: list(adapters or {})}})

    def contents(self, engine_content: dict[str, Any], gateway_content: dict[str, Any]) -> None:
        engine = {"max_rows": 4, "num_pages": 200, "max_adapters": 1}
        model = {"model": str(self._model), "name": MODEL, "engine": engine}
        application = {
            "name": MODEL,
            "route_prefix": "/swap",
            "import_path": "actors.serving.app:build",
            "args": {"device": "cpu", "models": [model]},
            "deployments": [
                {"name": MODEL, "user_config": engine_content},
                {"name": "Gateway", "user_config": gateway_content},
            ],
        }
        self._client.deploy_applications({"applications": [application]})


@pytest.fixture(scope="module")
def deploy(dashboard_url: str, tiny_model_dir: Path) -> Deployer:
    return Deployer(dashboard_url, tiny_model_dir)


@pytest.fixture(scope="module")
def url(serve_instance: str, deploy: Deployer) -> Iterator[str]:
    from ray import serve

    deploy()
    deadline = time.monotonic() + LIMIT
    while (state := serve.status().applications.get(MODEL)) is None or state.status != "RUNNING":
        assert time.monotonic() < deadline and (state is None or state.status != "DEPLOY_FAILED"), state
        time.sleep(0.2)
    yield f"{serve_instance}/swap"
    serve.delete(MODEL)


def health(url: str) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(f"{url}/health", timeout=LIMIT).json()
    return body


def replica(url: str) -> dict[str, Any]:
    (model,) = health(url)["models"]
    (one, *_) = model["replicas"] or [{}]
    return dict(one)


def wait_until_taken(url: str, field: str, wanted: Any) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT
    while (state := replica(url)).get(field, "unknown") != wanted:
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return state


def complete(url: str, name: str = MODEL, **fields: Any) -> httpx.Response:
    body = {"model": name, "prompt": [9, 9, 9], "max_tokens": 60} | fields
    return httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT)


def stream(url: str, seed: int, begun: threading.Semaphore) -> list[str]:
    slow = {"decoding": {"buffer_size": 1, "tau_m2t": 1.0}, "temperature": 1, "seed": seed, "max_tokens": 300}
    body = {"model": MODEL, "prompt": [9, 9, seed], "stream": True, "n": 2, **slow}
    lines: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT) as response:
        for line in filter(None, response.iter_lines()):
            if not lines:
                begun.release()
            lines.append(line)
    return lines


def test_weights_change_under_streams_that_end_whole(
    url: str, deploy: Deployer, tiny_model_dir: Path, other_weights: Path
) -> None:
    before = replica(url)
    old = complete(url).json()["choices"]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream, url, seed, begun) for seed in range(STREAMS)]
        for _ in streams:
            assert begun.acquire(timeout=LIMIT)
        deploy(weights=other_weights)
        wait_until_taken(url, "weights", {"folder": str(other_weights), "version": 1})
        for one in streams:
            lines = one.result()
            assert lines[-1] == "data: [DONE]"
            choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
            assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1]
    assert complete(url).json()["choices"] != old
    deploy()
    after = wait_until_taken(url, "weights", {"folder": str(tiny_model_dir), "version": 2})
    assert complete(url).json()["choices"] == old
    assert after["pid"] == before["pid"]


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(url: str, deploy: Deployer, tmp_path: Path) -> None:
    old = complete(url).json()["choices"]
    deploy(weights=tmp_path / "nowhere")
    deadline = time.monotonic() + LIMIT
    while (state := replica(url)).get("refused_content") is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "nowhere" in state["refused_content"]
    assert state["ready"]
    assert complete(url).json()["choices"] == old
    deploy()
    wait_until_taken(url, "refused_content", None)


def test_content_that_nothing_can_be_made_of_is_refused_by_both(url: str, deploy: Deployer) -> None:
    """A misspelt field, and adapters of a model that is not served; both processes go on as before."""
    old, pid = complete(url).json()["choices"], replica(url)["pid"]
    deploy.contents({"weight": "elsewhere"}, {"adapters": {"unknown": ["tuned"]}})
    deadline = time.monotonic() + LIMIT
    while not ((own := replica(url).get("refused_content")) and (gateway := health(url)["refused_content"])):
        assert time.monotonic() < deadline, health(url)
        time.sleep(0.1)
    assert "'user_config.weight'" in own and "known: weights, adapters" in own
    assert gateway == f"user_config.adapters: 'unknown' is no model; served here: {MODEL}"
    assert complete(url).json()["choices"] == old
    deploy()
    wait_until_taken(url, "refused_content", None)
    assert replica(url)["pid"] == pid


def test_an_adapter_comes_and_goes_by_name(url: str, deploy: Deployer, tiny_model_dir: Path, tmp_path: Path) -> None:
    assert complete(url, ADAPTER).status_code == 404
    pid, base = replica(url)["pid"], complete(url).json()["choices"]
    folder = write_adapter(tmp_path / "adapter", load_config(tiny_model_dir), seed=1)
    deploy(adapters={ADAPTER: str(folder)})
    wait_until_taken(url, "adapters", {ADAPTER: str(folder)})
    names = [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=LIMIT).json()["data"]]
    assert names == [MODEL, ADAPTER]
    tuned = complete(url, ADAPTER).json()
    assert tuned["model"] == ADAPTER
    assert tuned["choices"] != base
    assert complete(url).json()["choices"] == base
    deploy()
    wait_until_taken(url, "adapters", {})
    assert complete(url, ADAPTER).status_code == 404
    assert replica(url)["pid"] == pid
