"""The API as an OpenAPI document, from the same types that parse its requests."""

from typing import Any

from pydantic.json_schema import models_json_schema

from mbd_core.serving.api.other_requests import (
    DetokenizeRequest,
    ModelOrder,
    SleepOrder,
    TokenizeRequest,
    WeightsUpdate,
)
from mbd_core.serving.api.replies import COMPONENTS, SHAPES, FrameEvent
from mbd_core.serving.api.requests import MAX_PROMPTS, ChatRequest, CompletionRequest

TITLE, VERSION = "mbd-cluster", "1"
RESPONSES = {  # status: what it means
    400: "A request that cannot be honoured; the error names the field.",
    401: "An API key of this server is needed.",
    403: "An administrator's key is needed.",
    404: "No such model.",
    409: "An administrator's order that the replicas refuse.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "As many requests wait as may, too many long prompts are being read, or the client has as many choices under "
    "way as it may; `Retry-After` says when to try again.",
    500: "The engine failed.",
    503: "The server shuts down or has no engine, for now.",
    504: "The time limit of a request is over.",
}
REQUESTS = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ModelOrder,
    WeightsUpdate,
    SleepOrder,
)
ORDERS: dict[str, type[ModelOrder]] = {  # for administrators
    "/update_weights": WeightsUpdate,
    "/sleep": SleepOrder,
    "/wakeup": ModelOrder,
    "/abort_requests": ModelOrder,
}
FOR_ADMINISTRATORS = {*ORDERS, "/metrics"}  # not offered by a server without keys
WITHOUT_KEY = {"/ready", "/version"}
KEY = "key"
BEARER = {"type": "http", "scheme": "bearer", "description": "A key of the file of --api-keys."}
MAY_BE_EMPTY = {kind.__name__ for kind in (SleepOrder, ModelOrder)}  # all of their fields may be left out
_TEXT = {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}


def openapi_document(*, body_prompts: int = MAX_PROMPTS, keys: bool = True) -> dict[str, Any]:
    """OpenAPI 3.1: the routes, the requests' fields with their bounds, the shapes of answers and errors.

    `body_prompts` is how many prompts this server takes in one body, `keys` whether it asks for API keys. A rule over
    several fields (`top_p` needs `temperature`) or of the model (its names, its length) is in no schema; a request
    that breaks one is answered with 400 or 404.
    """
    _, requests = models_json_schema(
        [(kind, "validation") for kind in REQUESTS] + [(FrameEvent, "serialization")],
        ref_template=COMPONENTS,
    )
    for form in requests["$defs"]["CompletionRequest"]["properties"]["prompt"]["anyOf"]:
        if form["type"] == "array" and form["items"]["type"] != "integer":  # several prompts, not one of token ids
            form["maxItems"] = body_prompts
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": VERSION},
        "paths": {
            "/v1/chat/completions": {"post": _generating("chat", "ChatRequest")},
            "/v1/completions": {"post": _generating("complete", "CompletionRequest")},
            "/v1/models": {"get": _reading("list_models", "Models", 401)},
            "/v1/models/{name}": {
                "get": {
                    **_reading("get_model", "Model", 401, 404),
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            "/tokenize": {"post": _posting("tokenize", "TokenizeRequest", _json("TokenIds"))},
            "/detokenize": {"post": _posting("detokenize", "DetokenizeRequest", _json("TokenText"))},
            "/tokenizer_info": {
                "get": {
                    **_reading("tokenizer_info", "TokenizerInfo", 400, 401, 404),
                    "parameters": [{"name": "model", "in": "query", "schema": {"type": "string"}}],
                }
            },
            "/health": {
                "get": {"operationId": "health", "responses": {"200": _json("Health"), "503": _json("Health")}}
            },
            "/ready": {"get": {"operationId": "ready", "responses": {"200": _json("Ready"), "503": _json("Ready")}}},
            "/version": {"get": _reading("version", "Version")},
            "/metrics": {"get": {"operationId": "metrics", "responses": {"200": _TEXT, **_errors(401, 403, 503)}}},
            **{
                path: {"post": _posting(path.removeprefix("/"), kind.__name__, _json("Order"))}
                for path, kind in ORDERS.items()
            },
        },
        "components": {"schemas": {**SHAPES, **requests["$defs"]}, "securitySchemes": {KEY: BEARER}},
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = _security(path, keys=keys)
    return document


def _security(path: str, *, keys: bool) -> list[dict[str, list[str]]]:
    """What a route asks for: a key, none, or (`/health`) one that it says more to."""
    if path in WITHOUT_KEY or not (keys or path in FOR_ADMINISTRATORS):
        return []
    return [{KEY: []}, {}] if path == "/health" else [{KEY: []}]


def _generating(operation: str, request: str) -> dict[str, Any]:
    answer = _json("Answer", "The whole answer, or with `stream` its events.")
    answer["content"]["text/event-stream"] = {"schema": {"$ref": COMPONENTS.format(model="Event")}}
    return _posting(operation, request, answer)


def _posting(operation: str, request: str, answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": operation,
        "requestBody": {"required": request not in MAY_BE_EMPTY, **_content(request)},
        "responses": {"200": answer, **_errors(*RESPONSES)},
    }


def _reading(operation: str, shape: str, *errors: int) -> dict[str, Any]:
    return {"operationId": operation, "responses": {"200": _json(shape), **_errors(*errors)}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): _json("Error", RESPONSES[status]) for status in statuses}


def _json(shape: str, description: str = "") -> dict[str, Any]:
    return {"description": description, **_content(shape)}


def _content(shape: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": COMPONENTS.format(model=shape)}}}}
