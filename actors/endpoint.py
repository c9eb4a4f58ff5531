"""The HTTP endpoint: OpenAI's routes over one engine, as a Ray Serve deployment.

Annotations in this file are evaluated when it is imported: FastAPI under `serve.ingress` cannot resolve postponed
ones, so `from __future__ import annotations` must not be added.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve.config import BackpressureConfig
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from mbd_core.serving.answer import Answer
from mbd_core.serving.endpoint_args import EndpointArgs
from mbd_core.serving.open_requests import DRAIN_SECONDS
from mbd_core.serving.openai_errors import ApiError, api_error, clipped
from mbd_core.serving.openai_server import OpenAIServer
from mbd_core.trace.recorder import TraceRecorder

log = logging.getLogger("ray.serve")

TRACE_ROWS_PER_FILE, TRACE_FILES = 20_000, 64
STOP_SECONDS = 10.0  # for a replica's own end, once no request is under way


class EventStream(StreamingResponse):
    """An answer as server-sent events; however the response ends, the engine drops what is unfinished."""

    def __init__(self, answer: Answer) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(answer.events(logged), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


def logged(error: Exception) -> ApiError:
    """The error that the client sees; a failure of ours goes to the log with its traceback."""
    seen = api_error(error)
    if seen.status >= 500:
        log.error("request failed", exc_info=error)
    return seen


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown route, wrong method) in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = f"{clipped(request.method)} {clipped(request.url.path)}: {error.detail}"
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))


api = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers={HTTPException: _on_http_error})


async def respond(answer: Callable[[], Awaitable[Answer]]) -> Response:
    """The response to a generating request; every error becomes one in OpenAI's shape."""
    try:
        result = await answer()
        if result.streamed:
            return EventStream(result)
        try:
            return JSONResponse(await result.whole())
        finally:
            result.close()
    except Exception as error:  # the last line of defence: the client must not get a traceback
        return error_response(logged(error))


# `serve.ingress` copies the class while this module is being imported: what its methods use must stand above it.
@serve.deployment
@serve.ingress(api)
class Endpoint:
    """One replica: one `OpenAIServer`, and its routes."""

    def __init__(self, args: EndpointArgs) -> None:
        torch.set_num_threads(args.num_threads)
        trace = None if args.trace is None else self._recorder(Path(args.trace))
        self.server = OpenAIServer(args, log=log, trace=trace)
        log.info(self.describe())

    async def __del__(self) -> None:
        """Awaited by Serve when it ends a replica in good order."""
        if hasattr(self, "server"):  # the model could be loaded
            await self.server.stop()

    def _recorder(self, folder: Path) -> TraceRecorder:
        own = folder / f"replica-{serve.get_replica_context().replica_id.unique_id}"
        return TraceRecorder(folder=own, rows_per_file=TRACE_ROWS_PER_FILE, max_files=TRACE_FILES)

    def describe(self) -> str:
        """The start line."""
        return self.server.describe()

    async def drain(self, seconds: float) -> int:
        """Refuse new requests from now on, wait for those under way for `seconds` at most; how many are left."""
        self.server.begin_drain()
        return await self.server.drained(seconds)

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica when this raises."""
        self.server.check_health()

    @api.get("/health")
    async def health(self) -> Response:
        body = self.server.health()
        return JSONResponse(body, status_code=200 if body["ready"] else 503)

    @api.get("/v1/models")
    async def models(self) -> Response:
        return JSONResponse(self.server.models())

    @api.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        try:
            return JSONResponse(self.server.model(name))
        except ApiError as error:
            return error_response(error)

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        body = await request.body()
        return await respond(lambda: self.server.complete(body))

    @api.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        body = await request.body()
        return await respond(lambda: self.server.chat(body))


def build(
    args: EndpointArgs, *, replicas: int = 1, num_gpus: int = 0, drain_seconds: float = DRAIN_SECONDS
) -> serve.Application:
    """The Serve application: `replicas` endpoints, each with its own copy of the model and `num_gpus` GPUs.

    `num_gpus` is 0 or one a tensor-parallel rank (`cluster.placement`); each rank is a process and takes a CPU.
    A replica takes every request and refuses beyond its own bound with 429; Serve's queue before it is bounded too.
    Replicas on CPUs divide the machine's memory for keys and values, as they may be on one machine.
    A replica that Serve ends alone, in a redeployment, has `drain_seconds` to finish its requests: Serve routes no
    more to it, waits, and kills it when the time is over.
    """
    engine = args.engine
    if num_gpus == 0:
        engine = replace(engine, kv_memory_fraction=engine.kv_memory_fraction / replicas)
    return Endpoint.options(  # type: ignore[attr-defined]  # Serve's decorators are not typed through
        num_replicas=replicas,
        max_ongoing_requests=max(1000, 2 * (engine.max_rows + args.max_waiting)),
        max_queued_requests=args.max_waiting,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=2,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=drain_seconds + STOP_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": args.tensor_parallel, "num_gpus": num_gpus},
    ).bind(replace(args, engine=engine))
