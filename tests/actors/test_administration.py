"""Operations over HTTP, to a gateway and its replicas in this process: who may, what happens, and what goes on."""

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema
import pytest
import torch
from gateway_in_process import Handle, new_replica, running_gateway

from actors.serving.administration import Administration
from actors.serving.args import ServingArgs
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.saving import save_model
from mbd_core.checkpoint.tokenizer import load_tokenizer
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.openapi import openapi_document
from mbd_core.serving.api.orders import ORDERS, ModelOrder, Standing, WeightsUpdate

LIMIT = 300
MODEL, ADMIN, BEN = "tiny", "ann-0123456789abcdef", "ben-0123456789abcdef"
SLOW = {"max_tokens": 400, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}, "prompt": [9, 9, 9]}
LASTING = [path for path, order in ORDERS.items() if order.lasts]


def serving_args(folder: Path, keys: Path | None, **changes: Any) -> ServingArgs:
    model = {"model": str(folder), "name": MODEL, "engine": {"max_rows": 2, "num_pages": 200}}
    fields = {"device": "cpu", "models": [model], "api_keys": None if keys is None else str(keys)} | changes
    return ServingArgs.read(fields)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secrets") / "keys"
    file.write_text(f"ann {ADMIN} administrator\nben {BEN}\n")
    return file


@pytest.fixture(scope="module")
def other_weights(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("weights") / "other", load_model(tiny_model_dir)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    save_model(folder, model, tokenizer=load_tokenizer(tiny_model_dir, model.config), generation={"tau_m2t": 0.9})
    return folder


@pytest.fixture(scope="module")
def served(tiny_model_dir: Path, keys: Path) -> Iterator[tuple[str, Handle]]:
    with running_gateway(serving_args(tiny_model_dir, keys), num_replicas=2) as (url, (handle,)):
        yield url, handle


@pytest.fixture
def url(served: tuple[str, Handle]) -> str:
    return served[0]


def post(url: str, route: str, key: str = ADMIN, **body: Any) -> httpx.Response:
    return httpx.post(url + route, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=LIMIT)


def ask(url: str, **fields: Any) -> httpx.Response:
    return post(url, "/v1/completions", BEN, **{"model": MODEL, "prompt": [9, 9, 9], "max_tokens": 12} | fields)


def order(url: str, route: str, **body: Any) -> dict[str, Any]:
    answer = post(url, route, **body)
    assert answer.status_code == 200, answer.text
    done: dict[str, Any] = answer.json()
    schema = {**openapi_document(), "$ref": "#/components/schemas/Order"}
    jsonschema.validate(done, schema, jsonschema.Draft202012Validator)
    return done


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


class Stream:
    """A slow request whose events are read in a thread; `begun` is set with the first."""

    def __init__(self, url: str, pool: ThreadPoolExecutor, **fields: Any) -> None:
        self._url, self.begun = url, threading.Event()
        self._fields = {"model": MODEL, "stream": True} | SLOW | fields
        self.events = pool.submit(self._read)
        assert self.begun.wait(LIMIT)

    def _read(self) -> list[dict[str, Any]]:
        sent, headers = [], {"Authorization": f"Bearer {BEN}"}
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=self._fields, headers=headers, timeout=LIMIT) as answer:
            for line in filter(None, answer.iter_lines()):
                sent.append(line)
                self.begun.set()
        assert sent.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in sent]


def test_nobody_but_an_administrator_gives_orders(url: str, tiny_model_dir: Path) -> None:
    for route in ORDERS:
        body = {"folder": "x"} if route == "/update_weights" else {}
        assert error(httpx.post(url + route, json=body, timeout=LIMIT), 401)["code"] == "invalid_api_key"
        assert error(post(url, route, BEN, **body), 403)["code"] == "not_an_administrator"
    assert error(httpx.get(f"{url}/metrics", timeout=LIMIT), 401)
    assert error(httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {BEN}"}, timeout=LIMIT), 403)
    with running_gateway(serving_args(tiny_model_dir, None)) as (open_url, _):
        for route in ORDERS:
            assert "started without api_keys" in error(post(open_url, route), 403)["message"]
        assert error(httpx.get(f"{open_url}/metrics", timeout=LIMIT), 403)
        assert ask(open_url).status_code == 200


def test_what_is_wrong_in_an_order_is_named(url: str, tmp_path: Path) -> None:
    assert error(post(url, "/update_weights"), 400)["param"] == "folder"
    assert error(post(url, "/update_weights", folder="x", mode="now"), 400)["param"] == "mode"
    assert error(post(url, "/sleep", requests="drop"), 400)["param"] == "requests"
    assert error(post(url, "/sleep?level=2"), 400)["param"] == "level"
    assert error(post(url, "/wakeup?tags=weights"), 400)["param"] == "tags"
    assert error(post(url, "/wakeup", model="other"), 404)["code"] == "model_not_found"
    found = error(post(url, "/update_weights", folder=str(tmp_path / "nowhere")), 409)
    assert found["code"] == "refused" and "nowhere" in found["message"]
    key = {"Authorization": f"Bearer {BEN}"}
    states = httpx.get(f"{url}/health", headers=key, timeout=LIMIT).json()["models"][0]["replicas"]
    assert [state["weights"]["version"] for state in states] == [0, 0]


def test_a_packed_body_is_refused_as_such(url: str) -> None:
    asked = {"Authorization": f"Bearer {BEN}", "Content-Encoding": "gzip"}
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = httpx.post(url + route, content=gzip.compress(b"{}"), headers=asked, timeout=LIMIT)
        assert error(answer, 415)["code"] == "body_encoded"


def test_several_gateways_take_no_order_that_must_last(tiny_model_dir: Path, keys: Path) -> None:
    with running_gateway(serving_args(tiny_model_dir, keys, gateways=2)) as (url, _):
        for route in LASTING:
            body = {"folder": "x"} if route == "/update_weights" else {}
            assert error(post(url, route, **body), 409)["code"] == "several_gateways"
        assert order(url, "/abort_requests") == {"aborted": 0, "replicas": 1}


def test_other_weights_reach_all_replicas_and_later_ones_and_lose_no_request(
    served: tuple[str, Handle], tiny_model_dir: Path, other_weights: Path, keys: Path
) -> None:
    url, handle = served
    before = ask(url).json()
    assert (before["mbd"]["oldest_weights"], before["mbd"]["newest_weights"]) == (0, 0)
    with ThreadPoolExecutor(1) as pool:
        running = Stream(url, pool)
        assert order(url, "/update_weights", folder=str(other_weights), version=5) == {
            "folder": str(other_weights),
            "version": 5,
            "replicas": 2,
        }
        last = running.events.result()[-1]
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert (last["mbd"]["oldest_weights"], last["mbd"]["newest_weights"]) == (0, 5)
    after = ask(url).json()
    assert after["choices"] != before["choices"] and after["mbd"]["oldest_weights"] == 5
    assert [r.service.weights_version for r in handle.replicas] == [5, 5]
    assert error(post(url, "/update_weights", folder=str(tiny_model_dir), version=5), 400)["param"] == "version"

    args = serving_args(tiny_model_dir, keys).models[0]
    first, late = handle.replicas[0], new_replica(args)
    handle.replicas[0] = late
    try:
        assert ask(url).json()["choices"] == after["choices"], "a replica that started later"
        assert late.service.weights_version == 5
        assert order(url, "/update_weights", folder=str(tiny_model_dir), mode="wait")["version"] == 6
        assert ask(url).json()["choices"] == before["choices"]
    finally:
        handle.replicas.append(first)


def test_a_server_that_sleeps_says_so_and_wakes_up(served: tuple[str, Handle]) -> None:
    url, handle = served
    before = ask(url).json()["choices"]
    caches = [replica.service.loaded.engine.runner.cache for replica in handle.replicas]
    with ThreadPoolExecutor(2) as pool:
        running = Stream(url, pool)
        assert error(post(url, "/sleep", seconds=0), 409)["message"].startswith("requests still run after 0 s")
        assert httpx.get(f"{url}/ready", timeout=LIMIT).json() == {"ready": True, "asleep": False}
        slept = order(url, "/sleep")
        assert running.events.result()[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert slept["asleep"] and slept["freed_bytes"] == sum(c.k.nbytes + c.v.nbytes for c in caches)
    assert all(c.k.untyped_storage().nbytes() == 0 for c in caches)
    refused = ask(url)
    assert error(refused, 503)["code"] == "asleep" and int(refused.headers["retry-after"]) > 0
    ready = httpx.get(f"{url}/ready", timeout=LIMIT)
    assert (ready.status_code, ready.json()) == (503, {"ready": False, "asleep": True})
    assert ready.headers["retry-after"]
    assert httpx.get(f"{url}/health", timeout=LIMIT).json()["asleep"]
    assert error(post(url, "/update_weights", folder="x"), 409)["message"].startswith("the model sleeps")
    assert order(url, "/wakeup") == {"asleep": False, "replicas": len(caches)}
    assert httpx.get(f"{url}/ready", timeout=LIMIT).status_code == 200
    assert ask(url).json()["choices"] == before


def test_what_runs_can_be_ended(url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        running, whole = Stream(url, pool, n=3), pool.submit(ask, url, **SLOW)
        while (ended := order(url, "/abort_requests"))["aborted"] == 0:
            pass
        assert ended["replicas"] > 1
        events = running.events.result()
        reasons = [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]]
        assert reasons == ["abort"] * 3
        while not whole.done():  # it may have come after the order
            order(url, "/abort_requests")
        answer = whole.result().json()
    assert answer["choices"][0]["finish_reason"] in ("abort", "length", "stop")
    assert answer["usage"]["completion_tokens"] <= SLOW["max_tokens"]
    with ThreadPoolExecutor(1) as pool:
        running = Stream(url, pool)
        order(url, "/sleep?level=1", requests="abort")
        assert running.events.result()[-1]["choices"][0]["finish_reason"] == "abort"
    order(url, "/wakeup")
    assert ask(url).status_code == 200


class Replica:
    """Weights by their number, as `EngineService` keeps them; orders wait for `let_go`."""

    def __init__(self) -> None:
        self.version, self.folder, self.fails = 0, "", False
        self.let_go = asyncio.Event()
        self.let_go.set()

    async def state(self) -> dict[str, Any]:
        return {"weights": {"version": self.version}}

    async def apply(self, asked: ModelOrder) -> None:
        assert isinstance(asked, WeightsUpdate) and asked.version is not None
        await self.let_go.wait()
        if self.fails:
            raise RuntimeError("out of memory")
        if asked.version > self.version:
            self.version, self.folder = asked.version, asked.folder


def administration(*replicas: Replica, **changes: Any) -> tuple[Administration, Standing]:
    standing = Standing()
    fields = {"turn": asyncio.Lock(), "lasting": True, "may_be_empty": False} | changes
    return Administration(cast(Any, Handle(list(replicas))), standing, **fields), standing


def test_orders_for_weights_that_come_together_are_carried_out_one_after_the_other() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        orders, standing = administration(*replicas)
        done = await asyncio.gather(*(orders.carry_out(WeightsUpdate(folder=folder)) for folder in "ab"))
        assert [one["version"] for one in done] == [1, 2]
        assert standing.weights is not None and standing.weights.folder == "b"
        assert [(r.version, r.folder) for r in replicas] == [(2, "b")] * 2

    asyncio.run(run())


def test_an_order_whose_client_leaves_is_carried_out_to_its_end() -> None:
    async def run() -> None:
        replica = Replica()
        replica.let_go.clear()
        orders, standing = administration(replica)
        asked = asyncio.create_task(orders.carry_out(WeightsUpdate(folder="a")))
        await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        replica.let_go.set()
        await orders.carry_out(WeightsUpdate(folder="b"))  # comes after it
        assert standing.weights is not None and standing.weights.version == 2

    asyncio.run(run())


def test_an_order_that_some_replicas_have_not_carried_out_can_be_repeated() -> None:
    async def run() -> None:
        replicas = [Replica(), Replica()]
        orders, standing = administration(*replicas)
        replicas[1].fails = True
        with pytest.raises(ApiError, match="1 of 2 replicas"):
            await orders.carry_out(WeightsUpdate(folder="a", version=7))
        replicas[1].fails = False
        with pytest.raises(ApiError, match="must be at least 7"):
            await orders.carry_out(WeightsUpdate(folder="a", version=6))
        assert (await orders.carry_out(WeightsUpdate(folder="a", version=7)))["version"] == 7
        with pytest.raises(ApiError, match="must be at least 8"):
            await orders.carry_out(WeightsUpdate(folder="a", version=7))
        assert standing.weights is not None and [r.version for r in replicas] == [7, 7]

    asyncio.run(run())


def test_weights_that_no_replica_can_check_are_refused() -> None:
    async def run() -> None:
        orders, standing = administration(may_be_empty=True)
        with pytest.raises(ApiError, match="no replica runs") as refused:
            await orders.carry_out(WeightsUpdate(folder="mistyped"))
        assert refused.value.status == 409 and standing.weights is None

    asyncio.run(run())
