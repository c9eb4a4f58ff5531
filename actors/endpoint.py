"""The HTTP endpoint: OpenAI's routes over one engine, as a Ray Serve deployment.

Annotations in this file are evaluated when it is imported: FastAPI under `serve.ingress` cannot resolve postponed
ones, so `from __future__ import annotations` must not be added.
"""

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve.config import BackpressureConfig
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from mbd_core.checkpoint.folder import edit_note
from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.request import Counts, Output
from mbd_core.decoding.request import Request as EngineRequest
from mbd_core.engine.engine import EngineConfig
from mbd_core.engine.sequence import pages_needed
from mbd_core.models.quantize import Parts
from mbd_core.parallel.group import RankLost
from mbd_core.serving.async_engine import AsyncEngine, EngineFailed, TextStream, TooManyRequests
from mbd_core.serving.load import LoadedModel, load_engine
from mbd_core.serving.logprobs import ChoiceLogprobs, TokenTexts
from mbd_core.serving.openai_schema import (
    MAX_TOKENS_DEFAULT,
    ApiError,
    ChatRequest,
    Choice,
    CompletionRequest,
    GenerationRequest,
    Reply,
    parse,
)
from mbd_core.trace.recorder import TraceRecorder

log = logging.getLogger("ray.serve")

TRACE_ROWS_PER_FILE, TRACE_FILES = 20_000, 64


@dataclass(frozen=True, kw_only=True)
class EndpointArgs:
    """What a replica needs to start.

    folder           the model folder, on the replica's machine
    name             the name clients call the model by
    engine           the engine's sizes and switches
    max_waiting      requests that may wait for a row; more get 429
    num_threads      torch's threads a rank
    trace            a folder for step traces, on the replica's machine; each replica writes into one of its own in it,
                     the newest `TRACE_FILES` files of `TRACE_ROWS_PER_FILE` rows
    fp8              which weights are rounded to FP8
    tensor_parallel  ranks the model is cut among, each a process with a GPU of its own where the replica has GPUs
    """

    folder: str
    name: str
    engine: EngineConfig = EngineConfig()
    max_waiting: int = 256
    num_threads: int = 1
    trace: str | None = None
    fp8: Parts | None = None
    tensor_parallel: int = 1


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
        self.args = args
        self.trace = None if args.trace is None else self._recorder(Path(args.trace))
        self.loaded: LoadedModel = load_engine(
            Path(args.folder),
            args.engine,
            trace=self.trace,
            fp8=args.fp8,
            tensor_parallel=args.tensor_parallel,
        )
        self.loaded.prepare()
        self.defaults = {**asdict(self.loaded.decoding({})), "temperature": 0, "max_tokens": MAX_TOKENS_DEFAULT}
        self.engine = AsyncEngine(self.loaded.engine, self._decode, max_waiting=args.max_waiting)
        self.token_texts = TokenTexts(self.loaded.tokenizer)
        self.created = int(time.time())
        self.edit_noted = False
        log.info(self.describe())

    async def __del__(self) -> None:
        """Awaited by Serve when it ends a replica in good order: what was traced last is written."""
        if hasattr(self, "engine"):  # the model could be loaded
            await self.engine.stop()
            await asyncio.to_thread(self.loaded.close)
            if self.trace is not None:
                self.trace.close()

    def _recorder(self, folder: Path) -> TraceRecorder:
        own = folder / f"replica-{serve.get_replica_context().replica_id.unique_id}"
        return TraceRecorder(folder=own, rows_per_file=TRACE_ROWS_PER_FILE, max_files=TRACE_FILES)

    def _decode(self, tokens: list[int]) -> str:
        text = self.loaded.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def describe(self) -> str:
        """What computes here and why not otherwise, and the decoding of a request that asks for nothing; one line."""
        backend, attention = self.loaded.backend, self.loaded.engine.attention.describe()
        defaults = ", ".join(f"{name}={value}" for name, value in self.defaults.items() if value is not None)
        return f"{self.args.name}: {backend}; {attention}; defaults: {defaults}"

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica when this raises."""
        self.engine.check_health()
        self.loaded.check_health()

    @api.get("/health")
    async def health(self) -> Response:
        """Whether requests are served, how many are, and by what."""
        try:
            self.check_health()
            ready = True
        except (EngineFailed, RankLost):
            ready = False
        engine, load = self.loaded.engine, self.engine.load
        body = {
            "model": self.args.name,
            "ready": ready,
            "running": load.running,
            "waiting": load.waiting,
            "backend": self.loaded.backend,
            "tensor_parallel": self.args.tensor_parallel,
            "attention": {"name": engine.attention.name, "not_chosen": engine.attention.reasons},
            "defaults": self.defaults,
            "engine": asdict(engine.config) | {"block_size": engine.block_size, "page_size": engine.page_size},
            "prefix_cache": {"looked_up": engine.scheduler.pool.lookups, "found": engine.scheduler.pool.hits},
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

    def _decoding(self, asked: GenerationRequest) -> DecodingConfig:
        try:
            decoding = self.loaded.decoding(asked.decoding or {})
        except ValueError as error:
            raise ApiError(400, f"decoding: {error}", param="decoding", code="invalid_value") from None
        note = None if self.edit_noted else edit_note(self.args.name, self.loaded.defaults, decoding)
        if note is not None:
            self.edit_noted = True
            log.warning(note)
        return decoding

    def _engine_requests(
        self, asked: GenerationRequest, prompts: list[list[int]], *, field: str, seed: int
    ) -> list[EngineRequest]:
        """The engine's requests, prompt by prompt; raises `ApiError` naming the field that cannot be honoured."""
        if not prompts:
            raise ApiError(400, f"{field}: no prompt was given", param=field, code="invalid_value")
        decoding, samplings, capacity = self._decoding(asked), asked.samplings(seed), self.engine.capacity
        if len(prompts) * len(samplings) > capacity:
            name = field if len(prompts) > capacity else "n"
            message = f"{name}: {len(prompts) * len(samplings)} choices at once; this server takes at most {capacity}"
            raise ApiError(400, message, param=name, code="invalid_value")
        made = []
        for prompt in prompts:
            request = EngineRequest(
                request_id="",
                prompt=tuple(prompt),
                max_tokens=self._budget(asked, prompt, field=field),
                decoding=decoding,
                logprobs=asked.wants_logprobs,
            )
            self._check_fit(request, asked)
            made += [replace(request, request_id=uuid.uuid4().hex, sampling=sampling) for sampling in samplings]
        return made

    def _budget(self, asked: GenerationRequest, prompt: list[int], *, field: str) -> int:
        """How many tokens may follow the prompt."""
        engine, name = self.loaded.engine, asked.budget_field
        limit = min(self.loaded.config.max_positions, engine.scheduler.pool.capacity * engine.page_size)
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
        return budget

    def _check_fit(self, request: EngineRequest, asked: GenerationRequest) -> None:
        """What depends on the method: the pages it takes, and whether this engine has it."""
        engine, name = self.loaded.engine, asked.budget_field
        pages = pages_needed(request, block_size=engine.block_size, page_size=engine.page_size)
        if pages > engine.scheduler.pool.capacity:
            message = f"{name}: {request.max_tokens} take {pages} pages; there are {engine.scheduler.pool.capacity}"
            raise ApiError(400, message, param=name, code="context_length_exceeded")
        try:
            engine.validate(request)
        except ValueError as error:  # prompt, budget and pages have been checked
            raise ApiError(400, f"decoding: {error}", param="decoding", code="invalid_value") from None

    async def _answer(self, asked: GenerationRequest, prompts: list[list[int]], *, field: str) -> Response:
        chat = isinstance(asked, ChatRequest)
        seed = 0 if not asked.draws else secrets.randbits(32) if asked.seed is None else asked.seed
        requests = self._engine_requests(asked, prompts, field=field, seed=seed)
        try:
            stream = await self.engine.submit(requests, stop=asked.stop_strings)
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from None
        reply = Reply(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.args.name,
            chat=chat,
            num_choices=asked.num_choices,
            seed=seed if asked.draws else None,
        )
        telling = None
        if asked.wants_logprobs:
            telling = [ChoiceLogprobs(self.token_texts, self._decode, chat=chat) for _ in requests]
        if asked.stream:
            return EventStream(self._events(reply, stream, telling, include_usage=asked.usage_in_stream), stream)
        try:
            return JSONResponse(await self._gather(reply, stream, telling))
        finally:
            stream.close()

    async def _gather(self, reply: Reply, stream: TextStream, telling: list[ChoiceLogprobs] | None) -> dict[str, Any]:
        """The whole answer, its choices in the order of the requests; `telling` tells each one's log-probabilities."""
        texts = {r.request_id: "" for r in stream.requests}
        outputs: dict[str, Output] = {}
        async for step in stream:
            texts[step.request_id] += step.text
            if step.output is not None:
                outputs[step.request_id] = step.output
        ordered = [outputs[i] for i in texts]
        choices = [
            Choice(
                text=text,
                reason=output.finish_reason,
                logprobs=telling[i].add(output.tokens, output.logprobs or ()) if telling is not None else None,
            )
            for i, (text, output) in enumerate(zip(texts.values(), ordered, strict=True))
        ]
        return reply.full(choices, [o.counts for o in ordered])

    async def _events(
        self, reply: Reply, stream: TextStream, telling: list[ChoiceLogprobs] | None, *, include_usage: bool
    ) -> AsyncIterator[str]:
        """The answer as server-sent events. The last object before `[DONE]` carries `mbd`."""
        index = {r.request_id: i for i, r in enumerate(stream.requests)}
        counts: dict[int, Counts] = {}
        nothing: dict[str, Any] = {"usage": None} if include_usage else {}
        try:
            if reply.chat:
                for i in index.values():
                    yield event(reply.chunk(i, first=True) | nothing)
            async for step in stream:
                i, told = index[step.request_id], None
                if telling is not None and step.new_tokens:
                    told = telling[i].add(step.new_tokens, step.logprobs or ())
                if step.text or told:
                    yield event(reply.chunk(i, text=step.text, logprobs=told) | nothing)
                if step.output is None:
                    continue
                counts[i] = step.output.counts
                last = reply.chunk(i, reason=step.output.finish_reason) | nothing
                if len(counts) == len(index) and not include_usage:
                    last["mbd"] = reply.measures([counts[i] for i in sorted(counts)])
                yield event(last)
            if include_usage:
                yield event(reply.usage_chunk([counts[i] for i in sorted(counts)]))
            yield "data: [DONE]\n\n"
        except Exception as error:  # the status has been sent: the client is told inside the stream
            yield event(internal_error(error).body)


def build(args: EndpointArgs, *, replicas: int = 1, num_gpus: int = 0) -> serve.Application:
    """The Serve application: `replicas` endpoints, each with its own copy of the model and `num_gpus` GPUs.

    `num_gpus` is 0 or one a tensor-parallel rank (`cluster.placement`); each rank is a process and takes a CPU.
    A replica takes every request and refuses beyond its own bound with 429; Serve's queue before it is bounded too.
    """
    return Endpoint.options(  # type: ignore[attr-defined]  # Serve's decorators are not typed through
        num_replicas=replicas,
        max_ongoing_requests=max(1000, 2 * (args.engine.max_rows + args.max_waiting)),
        max_queued_requests=args.max_waiting,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        max_constructor_retry_count=2,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": args.tensor_parallel, "num_gpus": num_gpus},
    ).bind(args)
