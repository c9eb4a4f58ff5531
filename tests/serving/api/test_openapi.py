"""The OpenAPI document says what the parser takes: every field, and no bound that the parser does not have."""

import json
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st

from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.messages import CountTokensRequest, MessagesRequest
from mbd_core.serving.api.openapi import RESPONSES, openapi_document
from mbd_core.serving.api.orders import SleepOrder, WeightsUpdate
from mbd_core.serving.api.parsing import Strict, parse
from mbd_core.serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from mbd_core.serving.api.responses import ResponsesRequest

DOCUMENT = openapi_document()
REQUESTS: dict[type[Strict], dict[str, Any]] = {
    ChatRequest: {"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"model": "tiny", "prompt": "a"},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
    WeightsUpdate: {"folder": "a"},
    SleepOrder: {},
    ResponsesRequest: {"model": "m", "input": "a"},
    MessagesRequest: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    CountTokensRequest: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
}
NUMBERS = [0, 1, -1, 2, 0.5, 2.5, 128, 129, 2**31, -(2**63), 2**63, 1e-7]
VALUES = [None, True, False, *NUMBERS, "", "a", [], ["a"], [[1]], [-1], {}, {"type": "text"}, {"include_usage": True}]


def validator(kind: type[Strict]) -> jsonschema.Draft202012Validator:
    reference = f"#/components/schemas/{kind.__name__}"
    return jsonschema.Draft202012Validator({**DOCUMENT, "$ref": reference})


def test_the_document_is_valid_openapi() -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.validate()
    labels = {operation.ok().label for operation in schema.get_all_operations()}
    assert labels == {
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/responses",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "GET /v1/models",
        "GET /v1/models/{name}",
        "GET /health",
        "GET /ready",
        "GET /ping",
        "GET /version",
        "POST /tokenize",
        "POST /detokenize",
        "GET /tokenizer_info",
        "GET /metrics",
        "POST /update_weights",
        "POST /sleep",
        "POST /wakeup",
        "POST /abort_requests",
    }


def test_a_body_may_be_left_out_where_all_of_its_fields_may() -> None:
    paths = openapi_document()["paths"]
    orders = ("/update_weights", "/sleep", "/wakeup", "/abort_requests")
    needed = {path: paths[path]["post"]["requestBody"]["required"] for path in orders}
    assert needed == {"/update_weights": True, "/sleep": False, "/wakeup": False, "/abort_requests": False}


def test_it_says_how_many_prompts_a_server_takes() -> None:
    for most, document in ((128, DOCUMENT), (3, openapi_document(body_prompts=3))):
        schema = {**document, "$ref": "#/components/schemas/CompletionRequest"}
        allowed = jsonschema.Draft202012Validator(schema)
        for prompt in (["a"] * most, [[1]] * most, [1] * (most + 1), "a" * 1000):
            assert allowed.is_valid({"model": "tiny", "prompt": prompt})
        for prompt in (["a"] * (most + 1), [[1]] * (most + 1)):
            assert not allowed.is_valid({"model": "tiny", "prompt": prompt})


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_field_stands_in_it(kind: type[Strict]) -> None:
    described = DOCUMENT["components"]["schemas"][kind.__name__]
    assert set(described["properties"]) == set(kind.model_fields)
    assert described["additionalProperties"] is False
    assert all(schema.keys() - {"title", "default"} for schema in described["properties"].values()), "a field is open"


@pytest.mark.parametrize("kind", REQUESTS)
@given(data=st.data())
def test_what_the_parser_takes_the_document_allows(kind: type[Strict], data: st.DataObject) -> None:
    fields = st.dictionaries(st.sampled_from([*kind.model_fields, "unknown"]), st.sampled_from(VALUES), max_size=3)
    body = REQUESTS[kind] | data.draw(fields)
    try:
        parse(kind, encoded(body))
    except ApiError:
        return
    errors = [error.message for error in validator(kind).iter_errors(body)]
    assert not errors


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_the_document_forbids_the_parser_refuses(kind: type[Strict], value: Any) -> None:
    for name in [*kind.model_fields, "unknown"]:
        body = REQUESTS[kind] | {name: value}
        if not validator(kind).is_valid(body):
            with pytest.raises(ApiError) as refused:
                parse(kind, encoded(body))
            assert refused.value.status in RESPONSES


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
