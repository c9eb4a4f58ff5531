"""Administrators' routes from the served schema: orders in any order end in the answers that the schema names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schema_bounds import SchemaBounds
from schemathesis import checks
from schemathesis.schemas import BaseSchema

from mbd_core.serving.api.openapi import openapi_document
from mbd_core.serving.api.orders import MAX_VERSION, ORDERS

MODEL, APP = "ordered", "ordered"
LIMIT = 300  # seconds to wait for what comes by itself, however busy the machine is
ADMIN, CLIENT = "ann-0123456789abcdef", "ben-0123456789abcdef"
CHECKED = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def client(
    serve_instance: str, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    from ray import serve

    from actors.serving.app import application
    from actors.serving.args import ServingArgs

    keys = tmp_path_factory.mktemp("secrets") / "keys"
    keys.write_text(f"ann {ADMIN} administrator\nben {CLIENT}\n")
    model = {"model": str(tiny_model_dir), "name": MODEL, "engine": {"max_rows": 2, "num_pages": 100}}
    args = ServingArgs.read({"device": "cpu", "models": [model], "api_keys": str(keys)})
    serve.run(application(args), name=APP, route_prefix=f"/{APP}")
    with httpx.Client(base_url=f"{serve_instance}/{APP}", headers=authorized(ADMIN), timeout=LIMIT) as connected:
        yield connected
    serve.delete(APP)


@pytest.fixture(autouse=True)
def serves_again(client: httpx.Client, request: pytest.FixtureRequest) -> Iterator[None]:
    """After whatever was ordered the server wakes up and answers."""
    request.node._nodeid = request.node.nodeid  # pytest 9.2 has none, which Schemathesis 4.32 reads
    yield
    assert client.post("/wakeup").status_code == 200
    body = {"model": MODEL, "prompt": "Tom has 3 pens.", "max_tokens": 8}
    answer = client.post("/v1/completions", json=body, headers=authorized(CLIENT))
    assert answer.status_code == 200, answer.text


def authorized(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module", params=[*ORDERS, "/metrics"])
def schema(request: pytest.FixtureRequest) -> BaseSchema:
    """One path, made when a test begins: making its cases takes seconds."""
    document = openapi_document()
    return schemathesis.openapi.from_dict({**document, "paths": {request.param: document["paths"][request.param]}})


@pytest.mark.slow
@schemathesis.pytest.from_fixture("schema").parametrize()
@settings(max_examples=20, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_orders_answer_as_the_schema_says(client: httpx.Client, tiny_model_dir: Path, case: schemathesis.Case) -> None:
    given = case.body
    if isinstance(given, dict):
        if isinstance(given.get("model"), str):
            given["model"] = MODEL
        if isinstance(given.get("folder"), str) and given["folder"]:
            given["folder"] = str(tiny_model_dir)
            if type(given.get("version")) is int and 1 <= given["version"] < MAX_VERSION:
                del given["version"]  # one that is not more than the last is refused, and nothing else is tried
    case.call_and_validate(base_url=str(client.base_url), headers=authorized(ADMIN), timeout=LIMIT, checks=CHECKED)


@pytest.mark.slow
@pytest.mark.parametrize("path", list(ORDERS))
def test_every_field_of_an_order_at_its_bounds(client: httpx.Client, tiny_model_dir: Path, path: str) -> None:
    document = openapi_document()
    bounds = SchemaBounds(document)
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    least: dict[str, Any] = {"folder": str(tiny_model_dir)} if path == "/update_weights" else {}
    for name, schema in bounds.resolve(content["schema"])["properties"].items():
        for value in bounds.inside(schema):
            answer = client.post(path, json=least | {name: value})
            said = f"{name}={str(value)[:100]}: {answer.text[:300]}"
            assert answer.status_code in (200, 400, 404, 409), said
            if path == "/sleep":
                assert client.post("/wakeup").status_code == 200
        for value in bounds.outside(schema):
            assert client.post(path, json=least | {name: value}).status_code == 400, f"{name}={str(value)[:100]}"
