"""The gateway: OpenAI's and Anthropic's HTTP routes in front of the engines' replicas, as a Ray Serve deployment.

It holds each request until its answer has ended. If its replica dies, another replica continues after the last
committed token (`mbd_core/serving/tokens/resumable.py`).

Annotations in this file are evaluated when it is imported: FastAPI under `serve.ingress` cannot resolve postponed
annotations, so `from __future__ import annotations` must not be added.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import ray
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from actors.paths import NO_PATHS, JobPaths
from actors.serving.administration import Administration
from actors.serving.args import GatewayContent, ModelArgs, ServingArgs
from actors.serving.data_rows import ROWS_KEY, answer_row
from actors.serving.http import (
    HANDLERS,
    HEADERS,
    authorization,
    check_query,
    client_key,
    playground_file,
    read_body,
    reply,
    request_id,
    respond,
)
from actors.serving.logs import join_core_logs, keep_to_loopback
from actors.serving.metrics import MODEL_MEASURES, REQUEST_MEASURES, Exporter, ExportTimer
from actors.serving.metrics_page import CONTENT_TYPE, metrics_page
from actors.serving.replica_source import ReplicaSource
from mbd_core.checkpoint.folder import read_folder
from mbd_core.serving.api.access import ApiKeys
from mbd_core.serving.api.errors import ASLEEP_SECONDS, ApiError, clip
from mbd_core.serving.api.openapi import PAGES, ROUTES, openapi_document
from mbd_core.serving.api.orders import ORDERS, Standing
from mbd_core.serving.api.parsing import parse
from mbd_core.serving.api.reference import docs_page
from mbd_core.serving.api.shapes import Completion, Health, ModelState, Ready, ReplicaState
from mbd_core.serving.server.openai_server import OpenAIServer, served_name
from mbd_core.serving.tokens.resumable import ResumingSource
from mbd_core.serving.tokens.served_model import EngineLimits, ServedModel

log = logging.getLogger("ray.serve")

LIMITS_PAUSE = 0.2  # seconds between two attempts to ask a replica for its limits
STATE_SECONDS = 5.0  # time for all replicas to answer `/health`
LEARN_SECONDS = 2.0  # time that a list of models waits for the replicas' limits
RECENT_SECONDS = 1.0  # largest age of a cached state, for `/ready` and for callers of `/health` without a key
Class = TypeVar("Class", bound=type)


@dataclass(kw_only=True)
class ServedRoute:
    """A served model and its Serve handle."""

    model: ModelArgs
    handle: DeploymentHandle
    paths: JobPaths = NO_PATHS
    standing: Standing = field(default_factory=Standing)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a long order is carried out
    _states: asyncio.Future[list[ReplicaState]] | None = None
    _states_until: float = 0.0

    async def served_model(
        self, adapter: str | None, *, retry_seconds: float, on_loss: Callable[[], None]
    ) -> ServedModel:
        """The model as the API sees it, with an adapter or without.

        Asks a replica for its limits; if there is no replica, waits until a replica has started. Raises `ApiError`
        (503) at once for a folder that no replica could load.
        """
        asking = asyncio.ensure_future(self._limits())
        try:
            args = await asyncio.to_thread(self.model.checked, self.paths.fetch)
            folder = await asyncio.to_thread(read_folder, Path(args.model))
            limits = await asking
        except ValueError as error:
            log.error("%s cannot be served", self.model.served_name, exc_info=error)
            message = f"model '{self.model.served_name}' cannot be served: {clip(str(error))}"
            raise ApiError(503, message, code="no_replica") from error
        finally:
            asking.cancel()
        return ServedModel(
            name=adapter or self.model.served_name,
            tokenizer=folder.tokenizer,
            limits=limits,
            source=ResumingSource(
                ReplicaSource(self.handle, self.standing), retry_seconds=retry_seconds, on_loss=on_loss
            ),
            num_engines=self.model.most_replicas,
            adapter=adapter,
            call_form=self.model.call_form,
            may_grow=self.model.least_replicas < self.model.most_replicas,
        )

    async def _limits(self) -> EngineLimits:
        """The limits, from the first replica that answers."""
        while True:
            try:
                return await self.handle.limits.remote()
            except RayActorError:
                await asyncio.sleep(LIMITS_PAUSE)

    async def states(self, *, recent: bool) -> list[ReplicaState]:
        """`EngineReplica.state` of each replica, with an error for a replica that does not answer.

        Concurrent callers share one call to the replicas; a `recent` answer may be `RECENT_SECONDS` old.
        """
        if self._states is None or (self._states.done() and not (recent and time.monotonic() < self._states_until)):
            self._states = asyncio.ensure_future(self._ask_states())
        return await asyncio.shield(self._states)

    def forget_states(self) -> None:
        """Drop the cached states after an order; the next caller gets new states."""
        self._states = None

    async def _ask_states(self) -> list[ReplicaState]:
        try:
            replies = await self.handle.broadcast("state").results_async(
                timeout_s=STATE_SECONDS, return_exceptions=True
            )
        except Exception as error:  # Serve has no single type for a deployment that is late or has no replicas
            return [] if self.model.least_replicas == 0 else [_unreachable(error)]
        finally:
            self._states_until = time.monotonic() + RECENT_SECONDS
        return [_unreachable(reply) if isinstance(reply, Exception) else reply for reply in replies]


def _unreachable(error: Exception) -> ReplicaState:
    return {"ready": False, "running": 0, "waiting": 0, "error": clip(f"{type(error).__name__}: {error}")}


def _state_response(body: Ready | Health) -> Response:
    """200, or 503; a server that sleeps adds `Retry-After`."""
    headers = {"Retry-After": str(ASLEEP_SECONDS)} if body["asleep"] else {}
    return JSONResponse(body, status_code=200 if body["ready"] else 503, headers=headers)


api = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers=HANDLERS)


def _path(request: Request) -> str:
    """The path of a request's route."""
    path: str = request.scope["route"].path
    return path


def add_routes(gateway: Class) -> Class:
    """Add `ROUTES` and `PAGES` to `api`. The class's methods answer them; `order` answers every order."""
    for route in (*ROUTES, *PAGES):
        path = route.path.replace("{name}", "{name:path}")  # a model's name may have slashes
        endpoint = getattr(gateway, "order" if path in ORDERS else route.operation)
        for method in (route.method, *(["head"] if route.head else [])):
            api.add_api_route(path, endpoint, methods=[method.upper()])
    return gateway


# `serve.ingress` copies the class during the import of this module: names that its methods use must be defined above.
@serve.deployment
@serve.ingress(api)
@add_routes
class Gateway:
    """One `OpenAIServer` and its routes."""

    def __init__(self, args: ServingArgs, handles: list[DeploymentHandle], paths: JobPaths = NO_PATHS) -> None:
        """`handles` correspond to `args.models`."""
        join_core_logs()
        keep_to_loopback()
        self._args = args
        self._routes = {
            model.served_name: ServedRoute(model=model, handle=handle, paths=paths)
            for model, handle in zip(args.models, handles, strict=True)
        }
        self._keys = None if args.api_keys is None else ApiKeys(args.api_keys)
        self.server = OpenAIServer(
            {},
            request_seconds=args.request_seconds,
            client_requests=args.client_requests,
            body_prompts=args.body_prompts,
            log=log,
        )
        self._document = openapi_document(body_prompts=args.body_prompts, keys=self._keys is not None)
        self._bases: dict[str, str] = {}  # the model of each served name, which names a model or an adapter
        self._serves = False
        self._refusal: str | None = None  # why the newest content was not adopted
        least = {name: route.model.least_replicas for name, route in self._routes.items()}
        self._exports = ExportTimer(
            Exporter(MODEL_MEASURES, lambda: least),
            Exporter(REQUEST_MEASURES, lambda: self.server.measures.by_model),
        )

    def reconfigure(self, content: dict[str, Any]) -> None:
        """Serve the models and their adapters by name; called by Serve with `GatewayContent`.

        At the start, bad content is an error. Later the gateway keeps its old content, and `/health` says why.
        """
        try:
            adapters = GatewayContent.read(content).adapters
            for base in adapters.keys() - self._routes.keys():
                raise ValueError(f"user_config.adapters: '{base}' is no model; served here: {', '.join(self._routes)}")
        except ValueError as error:
            if not self._serves:
                raise
            log.error("adapters were not taken over", exc_info=error)
            self._refusal = str(error)
            return
        models = {name: self._model(name, route, None) for name, route in self._routes.items()}
        self._bases = {name: name for name in self._routes}
        for base, names in adapters.items():
            models |= {name: self._model(name, self._routes[base], name) for name in names}
            self._bases |= dict.fromkeys(names, base)
        self.server.offer(models)
        self._serves, self._refusal = True, None

    def _model(self, name: str, route: ServedRoute, adapter: str | None) -> Callable[[], Awaitable[ServedModel]]:
        def on_loss() -> None:
            self.server.measures.by_model[name].on_loss()

        return lambda: route.served_model(adapter, retry_seconds=self._args.retry_seconds, on_loss=on_loss)

    async def __del__(self) -> None:
        """Serve awaits this when it stops a gateway that has not failed."""
        if hasattr(self, "_exports"):
            await asyncio.to_thread(self._exports.stop)
            await self.server.stop()

    async def describe(self) -> list[str]:
        """The start lines of the models that have a replica."""
        return [await route.handle.describe.remote() for route in self._routes.values() if route.model.least_replicas]

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, and wait at most `seconds` for running requests.

        Returns the number of open requests.
        """
        self.server.begin_drain()
        return await self.server.wait_until_drained(seconds)

    async def answer_chat(self, row: dict[str, Any]) -> AsyncIterator[Completion]:
        """The answer to a row of Ray Data, a chat request."""
        async for answer in answer_row(lambda body: self.server.chat(body, key=ROWS_KEY, limited=False), row):
            yield answer

    async def answer_completion(self, row: dict[str, Any]) -> AsyncIterator[Completion]:
        """The answer to a row of Ray Data, a completion request."""
        async for answer in answer_row(lambda body: self.server.complete(body, key=ROWS_KEY, limited=False), row):
            yield answer

    async def health(self, request: Request) -> Response:
        """All fields if the server has no keys or the request has a valid key, else `ready`, `asleep` and
        `draining`."""
        whole = self._keys is None or self._keys.has(authorization(request))
        body = await self._health(recent=not whole)
        short: Health = {"ready": body["ready"], "asleep": body["asleep"], "draining": body["draining"]}
        return _state_response(body if whole else short)

    async def _health(self, *, recent: bool) -> Health:
        states = await asyncio.gather(*(route.states(recent=recent) for route in self._routes.values()))
        models: list[ModelState] = []
        for (name, route), replicas in zip(self._routes.items(), states, strict=True):
            ready = route.model.least_replicas == 0 or any(r["ready"] for r in replicas)
            models.append({"name": name, "ready": ready, "replicas": replicas})
        all_replicas = [replica for model in models for replica in model["replicas"]]
        asleep = any(route.standing.asleep for route in self._routes.values())
        return {
            "ready": not (self.server.draining or asleep) and all(model["ready"] for model in models),
            "draining": self.server.draining,
            "asleep": asleep,
            "refused_content": self._refusal,
            "running": sum(r["running"] for r in all_replicas),
            "waiting": sum(r["waiting"] for r in all_replicas),
            "models": models,
        }

    async def ready(self) -> Response:
        body = await self._health(recent=True)
        return _state_response({"ready": body["ready"], "asleep": body["asleep"]})

    ping = ready

    async def version(self) -> Response:
        return JSONResponse({"version": version("mbd-cluster")})

    async def openapi(self) -> Response:
        return JSONResponse(self._document)

    async def docs(self) -> Response:
        return Response(docs_page(), media_type="text/html", headers=HEADERS)

    async def playground(self, request: Request) -> Response:
        return playground_file(_path(request).removeprefix("/") or "index.html")

    # The routes below need an API key, if the server has keys.

    def _client(self, request: Request) -> str:
        """The client; raises `ApiError` (401) without a valid key."""
        if self._keys is None:
            return client_key(request)
        return self._keys.client(authorization(request))

    async def list_models(self, request: Request) -> Response:
        self._client(request)
        await self._learn_limits()
        return JSONResponse(self.server.models())

    async def get_model(self, name: str, request: Request) -> Response:
        self._client(request)
        await self._learn_limits()
        return JSONResponse(self.server.model(name))

    async def _learn_limits(self) -> None:
        """Ask running replicas for the limits that a list of models shows."""
        names = [name for name, base in self._bases.items() if self._routes[base].model.least_replicas]
        await self.server.learn_limits(names, seconds=LEARN_SECONDS)

    async def complete(self, request: Request) -> Response:
        key, read = self._client(request), partial(read_body, request, self._args.body_bytes)
        return await respond(request, lambda: self.server.complete(read, key=key))

    async def chat(self, request: Request) -> Response:
        key, read = self._client(request), partial(read_body, request, self._args.body_bytes)
        return await respond(request, lambda: self.server.chat(read, key=key))

    async def respond(self, request: Request) -> Response:
        key, read = self._client(request), partial(read_body, request, self._args.body_bytes)
        return await respond(request, lambda: self.server.respond(read, key=key))

    async def message(self, request: Request) -> Response:
        key, read = self._client(request), partial(read_body, request, self._args.body_bytes)
        return await respond(request, lambda: self.server.message(read, key=key, request_id=request_id(request)))

    async def count_tokens(self, request: Request) -> Response:
        key = self._client(request)
        body = await read_body(request, self._args.body_bytes)
        return await reply(request, self.server.count_tokens(body, key=key))

    async def tokenize(self, request: Request) -> Response:
        self._client(request)
        body = await read_body(request, self._args.body_bytes)
        return await reply(request, self.server.tokenize(body))

    async def detokenize(self, request: Request) -> Response:
        self._client(request)
        body = await read_body(request, self._args.body_bytes)
        return await reply(request, self.server.detokenize(body))

    async def tokenizer_info(self, request: Request) -> Response:
        self._client(request)
        return await reply(request, self.server.tokenizer_info(request.query_params.get("model")))

    # The routes below need an administrator's key; a server without keys refuses them.

    def _administrator(self, request: Request) -> None:
        if self._keys is None:
            message = "this needs an administrator's key, and the server was started without api_keys"
            raise ApiError(403, message, code="not_an_administrator")
        log.info("%s %s by %s", request.method, request.url.path, self._keys.administrator(authorization(request)))

    async def metrics(self, request: Request) -> Response:
        self._administrator(request)
        nodes = await asyncio.to_thread(ray.nodes)
        page = await metrics_page(nodes, application=serve.get_replica_context().app_name)
        return PlainTextResponse(page, media_type=CONTENT_TYPE)

    async def order(self, request: Request) -> Response:
        """Answers each order in `ORDERS`."""
        self._administrator(request)
        kind = ORDERS[_path(request)]
        check_query(request, allowed=kind.query)
        order = parse(kind, await read_body(request, self._args.body_bytes) or b"{}")
        route = self._routes[served_name(order.model, self._routes)]
        administration = Administration(
            route.handle,
            route.standing,
            turn=route.turn,
            lasting=self._args.gateways == 1,
            may_be_empty=route.model.least_replicas == 0,
        )
        try:
            return await reply(request, administration.carry_out(order))
        finally:
            for model in self._routes.values():
                model.forget_states()
