"""The routes of the endpoint, and its OpenAPI document from the types of their requests and replies.

The gateway adds them to FastAPI from these tables (`actors/serving/gateway.py`).
"""

from copy import deepcopy
from functools import cache
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from mbd_core.serving.api import message_shapes, response_shapes, shapes
from mbd_core.serving.api.errors import ERRORS, MESSAGE_ROUTES
from mbd_core.serving.api.messages import CountTokensRequest, MessagesRequest
from mbd_core.serving.api.orders import ORDERS, ModelOrder
from mbd_core.serving.api.parsing import MAX_PROMPTS, Strict
from mbd_core.serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from mbd_core.serving.api.responses import ResponsesRequest

TITLE, VERSION = "mbd-cluster", "1"
COMPONENTS = "#/components/schemas/{model}"
KEY = "key"
BEARER = {"type": "http", "scheme": "bearer", "description": "A key of the file of --api-keys."}
ALL = (400, 401, 403, 404, 408, 409, 413, 429, 500, 503, 504)  # statuses of a route that reads a body
RESPONSES = {status: " ".join(kind.meaning for kind in ERRORS if kind.status == status) for status in ALL}


class ApiRoute(NamedTuple):
    """A route: the key it needs, its body, its reply with 200, its errors, and its parameters.

    operation  the method of `Gateway` that answers it, or the path of an order
    head       whether HEAD is answered too
    """

    method: Literal["get", "post"]
    path: str
    operation: str
    key: Literal["any", "administrator's", "none"]
    body: type[Strict] | None
    reply: Any
    errors: tuple[int, ...] = ALL
    parameters: tuple[dict[str, Any], ...] = ()
    note: str = ""
    head: bool = False

    @property
    def may_be_empty(self) -> bool:
        """Whether the body may be left out: the body is an order without required fields."""
        if self.body is None or not issubclass(self.body, ModelOrder):
            return False
        return not any(field.is_required() for field in self.body.model_fields.values())


def _body(order: type[ModelOrder]) -> type[ModelOrder]:
    """The document's type with the fields of an order."""
    return ModelOrder if order.model_fields.keys() == ModelOrder.model_fields.keys() else order


NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
MODEL = {"name": "model", "in": "query", "schema": {"type": "string"}}
OR_EVENTS = "with `stream`: `Event`s"
MESSAGES, COUNT = MESSAGE_ROUTES
OWN_ERRORS = "errors are `MessageError`s"
OR_MESSAGE_EVENTS = f"with `stream`: `MessageEvent`s; {OWN_ERRORS}"
OR_RESPONSE_EVENTS = "with `stream`: `ResponseEvent`s"
UNREADY = "503 with the same body while it is not ready; `HEAD` has the status alone"
SHORT = "without a key its first three fields, at most a second old"
ROUTES = (
    ApiRoute("post", "/v1/chat/completions", "chat", "any", ChatRequest, shapes.Completion, note=OR_EVENTS),
    ApiRoute("post", "/v1/completions", "complete", "any", CompletionRequest, shapes.Completion, note=OR_EVENTS),
    ApiRoute(
        "post", "/v1/responses", "respond", "any", ResponsesRequest, response_shapes.Response, note=OR_RESPONSE_EVENTS
    ),
    ApiRoute("post", MESSAGES, "message", "any", MessagesRequest, message_shapes.Message, note=OR_MESSAGE_EVENTS),
    ApiRoute("post", COUNT, "count_tokens", "any", CountTokensRequest, message_shapes.InputTokens, note=OWN_ERRORS),
    ApiRoute("get", "/v1/models", "list_models", "any", None, shapes.Models, (401,)),
    ApiRoute("get", "/v1/models/{name}", "get_model", "any", None, shapes.Model, (401, 404), (NAME,)),
    ApiRoute("post", "/tokenize", "tokenize", "any", TokenizeRequest, shapes.TokenIds),
    ApiRoute("post", "/detokenize", "detokenize", "any", DetokenizeRequest, shapes.TokenText),
    ApiRoute(
        "get",
        "/tokenizer_info",
        "tokenizer_info",
        "any",
        None,
        shapes.TokenizerInfo,
        (400, 401, 404),
        (MODEL,),
        "`?model=NAME` where several models are served",
    ),
    ApiRoute("get", "/health", "health", "none", None, shapes.Health, (503,), note=f"{SHORT}; {UNREADY}", head=True),
    ApiRoute("get", "/ready", "ready", "none", None, shapes.Ready, (503,), note=UNREADY, head=True),
    ApiRoute("get", "/ping", "ping", "none", None, shapes.Ready, (503,), note="as `/ready`", head=True),
    ApiRoute("get", "/version", "version", "none", None, shapes.Version, ()),
    ApiRoute("get", "/metrics", "metrics", "administrator's", None, None, (401, 403, 503), note="Prometheus text"),
    *(
        ApiRoute("post", path, path.removeprefix("/"), "administrator's", _body(order), shapes.Order)
        for path, order in ORDERS.items()
    ),
)
# The server's own pages, which the document leaves out. By `HEAD /` Claude Code looks for a server.
PAGES = tuple(
    ApiRoute("get", path, operation, "none", None, None, (), head=path == "/")
    for path, operation in (
        ("/openapi.json", "openapi"),
        ("/docs", "docs"),
        ("/", "playground"),
        ("/playground.css", "playground"),
        ("/playground.js", "playground"),
    )
)
EVENTS: dict[Any, type[Any]] = {
    shapes.Completion: shapes.Event,
    response_shapes.Response: response_shapes.ResponseEvent,
    message_shapes.Message: message_shapes.MessageEvent,
}
STREAMED = (*EVENTS.values(), shapes.Chunk, shapes.FrameEvent, shapes.Error, message_shapes.MessageError)


def openapi_document(*, body_prompts: int = MAX_PROMPTS, keys: bool = True) -> dict[str, Any]:
    """OpenAPI 3.1: the routes, the requests' fields with their bounds, the shapes of answers and errors.

    `body_prompts` is the most prompts in one body, `keys` whether the server asks for API keys. No schema holds rules
    over several fields (`top_p` needs `temperature`) or of the model (its names, its length). A request that breaks
    such a rule gets 400 or 404.
    """
    schemas = deepcopy(_schemas())
    for form in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]:
        if form["type"] == "array" and form["items"]["type"] != "integer":  # several prompts, not one of token ids
            form["maxItems"] = body_prompts
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, keys=keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": VERSION},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {KEY: BEARER}},
    }


@cache
def _schemas() -> dict[str, Any]:
    bodies = dict.fromkeys(route.body for route in ROUTES if route.body is not None)
    replies = dict.fromkeys(route.reply for route in ROUTES if route.reply is not None)
    every: Any = tuple.__class_getitem__((*bodies, *replies, *STREAMED))
    adapter: TypeAdapter[Any] = TypeAdapter(every, config=ConfigDict(use_attribute_docstrings=True))
    schemas: dict[str, Any] = adapter.json_schema(ref_template=COMPONENTS)["$defs"]
    return schemas


def _operation(route: ApiRoute, *, keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if route.reply is not None:
        content = _json(route.reply)
    if route.reply in EVENTS:
        content |= {"text/event-stream": {"schema": {"$ref": COMPONENTS.format(model=EVENTS[route.reply].__name__)}}}
    responses = {"200": {"description": route.note, "content": content}}
    for status in route.errors:
        reply = route.reply if route.path in ("/health", "/ready", "/ping") else shapes.Error
        reply = message_shapes.MessageError if route.path in MESSAGE_ROUTES else reply
        responses[str(status)] = {"description": RESPONSES[status], "content": _json(reply)}
    operation: dict[str, Any] = {"operationId": route.operation, "responses": responses}
    if route.body is not None:
        operation["requestBody"] = {"required": not route.may_be_empty, "content": _json(route.body)}
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    return operation | {"security": _security(route, keys=keys)}


def _json(kind: type[Any]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": COMPONENTS.format(model=kind.__name__)}}}


def _security(route: ApiRoute, *, keys: bool) -> list[dict[str, list[str]]]:
    """The key that a route needs: a key, no key, or for `/health` an optional key, which gets more fields."""
    if route.path == "/health" and keys:
        return [{KEY: []}, {}]
    needs_key = route.key == "administrator's" or (route.key == "any" and keys)
    return [{KEY: []}] if needs_key else []
