"""`/health`: who is told what, how often the replicas are asked, and what the OpenAPI document says of keys."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_in_process import Handle, running_gateway

from actors.serving import gateway
from actors.serving.args import ServingArgs
from mbd_core.serving.api.errors import ApiError

LIMIT = 300
MODEL, KEY = "tiny", "ann-0123456789abcdef"
SHORT = {"ready": True, "asleep": False, "draining": False}


def fields(folder: Path, **more: Any) -> ServingArgs:
    model = {"model": str(folder), "name": MODEL, "engine": {"max_rows": 2, "num_pages": 64}}
    return ServingArgs.read({"device": "cpu", "models": [model], **more})


@pytest.fixture(scope="module")
def guarded(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Handle]]]:
    keys = tmp_path_factory.mktemp("secrets") / "keys"
    keys.write_text(f"ann {KEY}\n")
    with running_gateway(fields(tiny_model_dir, api_keys=str(keys))) as running:
        yield running


def health(url: str, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = httpx.get(f"{url}/health", headers=headers, timeout=LIMIT)
    assert answer.status_code == 200, "whoever watches it needs no key"
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize("key", [None, "wrong", KEY[:-1]])
def test_without_a_key_it_says_whether_it_serves_and_no_more(
    guarded: tuple[str, list[Handle]], key: str | None
) -> None:
    url, _ = guarded
    assert health(url, key) == SHORT
    assert httpx.head(f"{url}/health", timeout=LIMIT).status_code == 200


def test_with_a_key_it_says_everything(guarded: tuple[str, list[Handle]]) -> None:
    body = health(guarded[0], KEY)
    assert SHORT.items() <= body.items()
    (model,) = body["models"]
    (replica,) = model["replicas"]
    assert replica["pid"] and replica["engine"]["max_rows"] == 2


def test_a_server_without_keys_says_everything_to_everybody(tiny_model_dir: Path) -> None:
    with running_gateway(fields(tiny_model_dir)) as (url, _):
        assert health(url)["models"][0]["replicas"][0]["pid"]
        document = httpx.get(f"{url}/openapi.json", timeout=LIMIT).json()
        assert document["paths"]["/v1/completions"]["post"]["security"] == []
        assert document["paths"]["/sleep"]["post"]["security"] == [{"key": []}], "not offered without keys"


def test_who_asks_again_and_again_without_a_key_asks_each_replica_once_a_second(
    guarded: tuple[str, list[Handle]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, (handle,) = guarded
    asked: list[str] = []
    broadcast = handle.broadcast

    def counted(method: str, *arguments: Any) -> Any:
        asked.append(method)
        return broadcast(method, *arguments)

    monkeypatch.setattr(handle, "broadcast", counted)
    monkeypatch.setattr(gateway, "RECENT_SECONDS", 60.0)
    health(url, KEY)
    assert asked == ["state"]
    with ThreadPoolExecutor(8) as clients:
        states = list(clients.map(lambda _: health(url), range(40)))
    assert httpx.get(f"{url}/ready", timeout=LIMIT).json()["ready"]
    assert asked == ["state"]
    assert all(state == SHORT for state in states)
    for number in (2, 3):
        health(url, KEY)
        assert asked == ["state"] * number, "with a key it is what is so now"


def test_those_who_ask_at_once_share_one_question(
    guarded: tuple[str, list[Handle]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, (handle,) = guarded
    under_way, most = 0, 0
    broadcast = handle.broadcast

    def counted(method: str, *arguments: Any) -> Any:
        asked = broadcast(method, *arguments).results_async

        async def results(**options: Any) -> Any:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.1)
            try:
                return await asked(**options)
            finally:
                under_way -= 1

        return SimpleNamespace(results_async=results)

    monkeypatch.setattr(handle, "broadcast", counted)
    with ThreadPoolExecutor(8) as clients:
        assert all(state["models"] for state in clients.map(lambda _: health(url, KEY), range(16)))
    assert most == 1


def test_the_document_declares_the_keys(guarded: tuple[str, list[Handle]]) -> None:
    document = httpx.get(f"{guarded[0]}/openapi.json", timeout=LIMIT).json()
    scheme = document["components"]["securitySchemes"]["key"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    needed = {path: next(o["security"] for o in operations.values()) for path, operations in document["paths"].items()}
    assert needed["/health"] == [{"key": []}, {}], "with a key or without"
    assert needed["/ready"] == needed["/ping"] == needed["/version"] == []
    others = {path: value for path, value in needed.items() if path not in ("/health", "/ready", "/ping", "/version")}
    assert all(value == [{"key": []}] for value in others.values()) and len(others) >= 10
    for path in ("/v1/models", "/tokenizer_info", "/metrics"):
        assert httpx.get(guarded[0] + path, timeout=LIMIT).status_code == 401


def test_a_folder_that_no_replica_could_load_is_said_at_once(tmp_path: Path) -> None:
    """Of a model without a replica (`min: 0`), where the first request would wait for one to the end of its time."""
    model = {"model": str(tmp_path / "nowhere"), "name": "gone", "replicas": {"min": 0, "max": 1}}
    (args,) = ServingArgs.read({"device": "cpu", "models": [model]}).models
    never = SimpleNamespace(limits=SimpleNamespace(remote=lambda: asyncio.Event().wait()))
    route = gateway.ServedRoute(model=args, handle=never)  # type: ignore[arg-type]

    async def ask() -> None:
        async with asyncio.timeout(LIMIT):
            await route.served_model(None, retry_seconds=1.0, on_loss=lambda: None)

    with pytest.raises(ApiError, match=r"model 'gone' cannot be served: unknown model '.*nowhere'") as refused:
        asyncio.run(ask())
    assert (refused.value.status, refused.value.code) == (503, "no_replica")
