"""The HTTP endpoint: OpenAI's routes over one engine, as a Ray Serve deployment.

Annotations in this file are evaluated when it is imported: FastAPI under `serve.ingress` cannot resolve postponed
ones, so `from __future__ import annotations` must not be added.
"""

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve.config import BackpressureConfig
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from actors.openai_schema import (
    MAX_TOKENS_DEFAULT,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Reply,
    decode_counts,
    parse,
)
from mbd_core.engine.async_engine import AsyncEngine, EngineFailed, TextStream, TooManyRequests
from mbd_core.engine.engine import EngineConfig
from mbd_core.engine.load import LoadedModel, load_engine
from mbd_core.types import Counts
from mbd_core.types import Request as EngineRequest

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, kw_only=True)
class EndpointArgs:
    """What a replica needs to start.

    folder       the model folder, on the replica's machine
    name         the name clients call the model by
    max_waiting  requests that may wait for a row; more get 429
    num_threads  torch's threads a replica
    """

    folder: str
    name: str
    max_rows: int = 16
    buffer_size: int = 4
    num_pages: int = 512
    max_waiting: int = 256
    num_threads: int = 1


class EventStream(StreamingResponse):
    """Server-sent events from one engine stream; however the response ends, the engine is rid of it."""

    def __init__(self, events: AsyncIterator[str], stream: TextStream) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


def internal_error(error: Exception) -> ApiError:
    """What a client is told of a failure of ours; the log has the rest."""
    log.error("request failed", exc_info=error)
    if isinstance(error, EngineFailed):
        return ApiError(500, "the engine failed; this replica is being replaced", code="engine_failed")
    return ApiError(500, "internal error; see the server's log", code="internal_error")


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown route, wrong method) in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))


api = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers={HTTPException: _on_http_error})


async def answered(handle: Callable[[], Awaitable[Response]]) -> Response:
    """Run a route; every error becomes a response in OpenAI's shape."""
    try:
        return await handle()
    except ApiError as error:
        return error_response(error)
    except TooManyRequests as error:
        return error_response(ApiError(429, str(error), code="too_many_requests", headers={"Retry-After": "1"}))
    except Exception as error:  # the last line of defence: logged, and told without its traceback
        return error_response(internal_error(error))


def event(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


# `serve.ingress` copies the class while this module is being imported: what its methods use must stand above it.
@serve.deployment
@serve.ingress(api)
class Endpoint:
    """One replica: one model, one engine, the routes."""

    def __init__(self, args: EndpointArgs) -> None:
        torch.set_num_threads(args.num_threads)
        sizes = EngineConfig(max_rows=args.max_rows, buffer_size=args.buffer_size, num_pages=args.num_pages)
        self.args = args
        self.loaded: LoadedModel = load_engine(Path(args.folder), sizes)
        self.engine = AsyncEngine(self.loaded.engine, self._decode, max_waiting=args.max_waiting)
        self.created = int(time.time())

    def _decode(self, tokens: list[int]) -> str:
        text = self.loaded.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica when this raises."""
        self.engine.check_health()

    @api.get("/health")
    async def health(self) -> Response:
        """Whether requests are served, and how many are."""
        try:
            self.engine.check_health()
            ready = True
        except EngineFailed:
            ready = False
        weights = next(self.loaded.engine.model.parameters())
        load = self.engine.load
        body = {
            "model": self.args.name,
            "ready": ready,
            "running": load.running,
            "waiting": load.waiting,
            "backend": f"torch {weights.device.type} {str(weights.dtype).removeprefix('torch.')}",
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    @api.get("/v1/models")
    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    @api.get("/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        async def handle() -> Response:
            self._check_model(name)
            return JSONResponse(self._card())

        return await answered(handle)

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        async def handle() -> Response:
            asked = parse(CompletionRequest, await request.body())
            self._check_model(asked.model)
            encode = self.loaded.tokenizer.encode
            prompts = [list(encode(p)) if isinstance(p, str) else p for p in asked.prompts]
            return await self._answer(asked, prompts, field="prompt")

        return await answered(handle)

    @api.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        async def handle() -> Response:
            asked = parse(ChatRequest, await request.body())
            self._check_model(asked.model)
            return await self._answer(asked, [self._chat_prompt(asked)], field="messages")

        return await answered(handle)

    # -- what the two generating routes share -------------------------------------------------------------------

    def _card(self) -> dict[str, Any]:
        return {"id": self.args.name, "object": "model", "created": self.created, "owned_by": "mbd"}

    def _check_model(self, name: str) -> None:
        if name != self.args.name:
            message = f"unknown model '{name}'; served here: {self.args.name}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _chat_prompt(self, asked: ChatRequest) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if tokenizer.chat_template is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
        roles = {"developer": "system"}
        messages = [{"role": roles.get(m.role, m.role), "content": m.text} for m in asked.messages]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert isinstance(tokens, list)
        return tokens

    def _engine_requests(
        self, asked: GenerationRequest, prompts: list[list[int]], *, field: str
    ) -> list[EngineRequest]:
        """One engine request a prompt; raises `ApiError` naming the field that cannot be honoured."""
        engine, name = self.loaded.engine, asked.budget_field
        limit = min(self.loaded.config.max_positions, engine.scheduler.pool.capacity * engine.page_size)
        try:
            decoding = self.loaded.decoding(asked.decoding or {})
        except ValueError as error:
            raise ApiError(400, f"decoding: {error}", param="decoding", code="invalid_value") from None
        if decoding.buffer_size > engine.config.buffer_size:
            message = f"decoding: buffer_size={decoding.buffer_size} exceeds this server's {engine.config.buffer_size}"
            raise ApiError(400, message, param="decoding", code="invalid_value")
        if not prompts:
            raise ApiError(400, f"{field}: no prompt was given", param=field, code="invalid_value")
        made = []
        for prompt in prompts:
            room = limit - len(prompt)
            if not prompt:
                message = f"{field}: the prompt is empty; give at least one token"
                raise ApiError(400, message, param=field, code="invalid_value")
            if room < 1:
                message = f"{field}: {len(prompt)} tokens leave no room to generate; the limit is {limit} in all"
                raise ApiError(400, message, param=field, code="context_length_exceeded")
            if max(prompt) >= self.loaded.config.vocab_size:
                message = f"{field}: token {max(prompt)} lies outside the vocabulary"
                raise ApiError(400, message, param=field, code="invalid_value")
            budget = min(room, MAX_TOKENS_DEFAULT) if asked.budget is None else asked.budget
            if budget > room:
                message = f"{name}: {budget} do not fit behind a prompt of {len(prompt)} tokens; at most {room} do"
                raise ApiError(400, message, param=name, code="context_length_exceeded")
            made.append(
                EngineRequest(request_id=uuid.uuid4().hex, prompt=tuple(prompt), max_tokens=budget, decoding=decoding)
            )
        return made

    async def _answer(self, asked: GenerationRequest, prompts: list[list[int]], *, field: str) -> Response:
        chat = isinstance(asked, ChatRequest)
        requests = self._engine_requests(asked, prompts, field=field)
        try:
            stream = await self.engine.submit(requests, stop=asked.stop_strings)
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from None
        prefix = "chatcmpl" if chat else "cmpl"
        reply = Reply(id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time()), model=self.args.name, chat=chat)
        if asked.stream:
            return EventStream(self._events(reply, stream, include_usage=asked.usage_in_stream), stream)
        try:
            return JSONResponse(await self._gather(reply, stream))
        finally:
            stream.close()

    async def _gather(self, reply: Reply, stream: TextStream) -> dict[str, Any]:
        """The whole answer, its choices in the order of the prompts."""
        texts = {r.request_id: "" for r in stream.requests}
        outputs = {}
        async for step in stream:
            texts[step.request_id] += step.text
            if step.output is not None:
                outputs[step.request_id] = step.output
        ordered = [outputs[i] for i in texts]
        return reply.full(list(texts.values()), [o.finish_reason for o in ordered], [o.counts for o in ordered])

    async def _events(self, reply: Reply, stream: TextStream, *, include_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events. The last object before `[DONE]` carries `mbd`."""
        index = {r.request_id: i for i, r in enumerate(stream.requests)}
        counts: list[Counts] = []
        nothing: dict[str, Any] = {"usage": None} if include_usage else {}
        try:
            if reply.chat:
                for i in index.values():
                    yield event(reply.chunk(i, first=True) | nothing)
            async for step in stream:
                if step.text:
                    yield event(reply.chunk(index[step.request_id], text=step.text) | nothing)
                if step.output is None:
                    continue
                counts.append(step.output.counts)
                last = reply.chunk(index[step.request_id], reason=step.output.finish_reason) | nothing
                if len(counts) == len(index) and not include_usage:
                    last["mbd"] = decode_counts(counts)
                yield event(last)
            if include_usage:
                yield event(reply.usage_chunk(counts) | {"mbd": decode_counts(counts)})
            yield "data: [DONE]\n\n"
        except Exception as error:  # the status has been sent: the client is told inside the stream
            yield event(internal_error(error).body)


def build(args: EndpointArgs, *, replicas: int = 1) -> serve.Application:
    """The Serve application: `replicas` endpoints, each a process with its own copy of the model.

    A replica takes every request and refuses beyond its own bound with 429; Serve's queue before it is bounded too.
    """
    return Endpoint.options(  # type: ignore[attr-defined]  # Serve's decorators are not typed through
        num_replicas=replicas,
        max_ongoing_requests=max(1000, 2 * (args.max_rows + args.max_waiting)),
        max_queued_requests=args.max_waiting,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=2,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 1},
    ).bind(args)
