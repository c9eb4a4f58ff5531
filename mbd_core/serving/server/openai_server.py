"""OpenAI's and Anthropic's APIs over served models, without HTTP and without Ray: bodies in, answers out."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from mbd_core.serving.api.dialect import ChatDialect
from mbd_core.serving.api.engine_requests import check_number
from mbd_core.serving.api.errors import AGAIN_SECONDS, ApiError, FieldError, clip
from mbd_core.serving.api.message_shapes import InputTokens
from mbd_core.serving.api.messages import CountTokensRequest, MessagesRequest
from mbd_core.serving.api.parsing import MAX_PROMPTS, parse
from mbd_core.serving.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from mbd_core.serving.api.responses import ResponsesRequest
from mbd_core.serving.api.shapes import Model, Models, TokenIds, TokenizerInfo, TokenText
from mbd_core.serving.api.tokenizer_replies import detokenize, tokenize, tokenizer_info
from mbd_core.serving.api.tokenizing import TokenizerThreads
from mbd_core.serving.server.answer import ServedAnswer
from mbd_core.serving.server.large_bodies import LARGE_BODY, LargeBodies
from mbd_core.serving.server.measures import RequestWatch, ServerMeasures
from mbd_core.serving.server.message_answer import MessageAnswer
from mbd_core.serving.server.model_route import ApiRequest, ModelRoute, TokenizedBody, first_seed
from mbd_core.serving.server.open_requests import OpenRequest, OpenRequests
from mbd_core.serving.server.response_answer import ResponseAnswer
from mbd_core.serving.tokens.fair_queue import Refusals
from mbd_core.serving.tokens.served_model import ServedModel
from mbd_core.serving.tokens.stream import TimeLimit

Body = bytes | Callable[[], Awaitable[bytes]]
G = TypeVar("G", CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)

MOST_SLOWED = 64  # delayed refusals at once, each with its connection and its body


class OpenAIServer:
    """Serves models by name. All methods belong to one event loop.

    To stop without cutting answers, call `begin_drain()` and `wait_until_drained(seconds)` first.
    """

    def __init__(
        self,
        models: Mapping[str, Callable[[], Awaitable[ServedModel]]],
        *,
        request_seconds: float | None = None,
        client_requests: int | None = None,
        body_prompts: int = MAX_PROMPTS,
        measures: ServerMeasures | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        """Limits and models.

        models           a function per model, called at the model's first request
        request_seconds  time limit of an answer, from the arrival of the whole body
        client_requests  most open choices of a client
        body_prompts     most prompts of a body
        measures         counts every request
        """
        self._models, self._request_seconds, self._body_prompts = dict(models), request_seconds, body_prompts
        self._log = log or logging.getLogger(__name__)
        self.measures = measures or ServerMeasures(self._models)
        self._routes: dict[str, ModelRoute] = {}
        self._learning: dict[str, asyncio.Future[ModelRoute]] = {}
        self._open_requests = OpenRequests(most_each=client_requests)
        self._created = int(time.time())
        self._tokenizing = TokenizerThreads()
        self._bodies = LargeBodies()
        self._refusals = Refusals(seconds=AGAIN_SECONDS, most=MOST_SLOWED)

    def offer(self, models: Mapping[str, Callable[[], Awaitable[ServedModel]]]) -> None:
        """Serve these models from now on; running requests continue."""
        self._models = dict(models)
        self._routes = {name: route for name, route in self._routes.items() if name in models}
        for name in models.keys() - self.measures.by_model.keys():
            self.measures.add(name)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._open_requests.draining

    def begin_drain(self) -> int:
        """Refuse new requests with 503 from now on. Open requests continue; returns their number."""
        return self._open_requests.begin_drain()

    async def wait_until_drained(self, seconds: float) -> int:
        """Wait until every answer has ended, at most `seconds`. Returns the number of open requests."""
        return await self._open_requests.wait_until_drained(seconds)

    async def stop(self) -> None:
        """End its threads; no request may follow."""
        for route in self._routes.values():
            route.stop()
        await asyncio.to_thread(self._tokenizing.shutdown)

    # -- models and state ---------------------------------------------------------------------------------------

    def models(self) -> Models:
        """The list of models."""
        return {"object": "list", "data": [self.model(name) for name in self._models]}

    def model(self, name: str) -> Model:
        """OpenAI's model object. Raises `ApiError` (404) for an unknown name."""
        served_name(name, self._models)
        route = self._routes.get(name)
        length = None if route is None else route.model.limits.admission.max_length
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "mbd",
            "max_model_len": length,
        }

    async def learn_limits(self, names: Collection[str], *, seconds: float) -> None:
        """Asks the engines of these models for unknown limits, and waits at most `seconds`."""
        for name in names:
            if name in self._models and name not in self._routes and name not in self._learning:
                task = asyncio.ensure_future(self._route(name))
                self._learning[name] = task
                task.add_done_callback(partial(self._learned, name))
        if tasks := [self._learning[name] for name in names if name in self._learning]:
            await asyncio.wait(tasks, timeout=seconds)

    def _learned(self, name: str, task: "asyncio.Future[ModelRoute]") -> None:
        del self._learning[name]
        if not task.cancelled() and task.exception() is not None:
            self._log.warning("%s did not tell its limits", name, exc_info=task.exception())

    # -- the tokenizer ------------------------------------------------------------------------------------------

    async def tokenize(self, body: bytes) -> TokenIds:
        """The token ids of a text or a chat. Raises the errors of `complete`."""
        api_request = parse(TokenizeRequest, body)
        async with TimeLimit(self._request_seconds).watch():
            model = (await self._route(served_name(api_request.model, self._models))).model
            return await self._tokenizing.run(partial(tokenize, api_request, model), characters=len(body))

    async def count_tokens(self, body: bytes, *, key: str = "") -> InputTokens:
        """The number of tokens of a prompt of `/v1/messages`. Raises the errors of `complete`."""
        api_request = await self._bodies.parse(CountTokensRequest, body, client=key)
        async with TimeLimit(self._request_seconds).watch():
            model = (await self._route(served_name(api_request.model, self._models))).model
            call = partial(tokenize, api_request.tokenize, model)
            try:
                counted = await self._tokenizing.run(call, characters=len(body))
            except ApiError as error:
                raise api_request.own_error(error) from error.__cause__
            return {"input_tokens": counted["count"]}

    async def detokenize(self, body: bytes) -> TokenText:
        """The text of token ids. Raises the errors of `complete`."""
        order = parse(DetokenizeRequest, body)
        async with TimeLimit(self._request_seconds).watch():
            call = partial(
                detokenize, order, (await self._route(served_name(order.model, self._models))).model.tokenizer
            )
            return await self._tokenizing.run(call, characters=len(order.tokens))

    async def tokenizer_info(self, name: str | None) -> TokenizerInfo:
        """The special tokens and the chat template. Raises the errors of `complete`."""
        async with TimeLimit(self._request_seconds).watch():
            return tokenizer_info((await self._route(served_name(name, self._models))).model.tokenizer)

    # -- requests -----------------------------------------------------------------------------------------------

    async def complete(self, body: Body, *, key: str = "", limited: bool = True) -> ServedAnswer:
        """The answer to a completion request. Waiting clients, told apart by `key`, take turns.

        Unless `limited`, a key may have any number of open choices. A body that has not arrived yet counts as one
        choice. Raises `ApiError`, `TooManyRequests`, `EngineFailed` and `RequestTimedOut`.
        """
        return (await self._answer(CompletionRequest, body, key=key, limited=limited))[1]

    async def chat(self, body: Body, *, key: str = "", limited: bool = True) -> ServedAnswer:
        """The answer to a chat request; arguments and errors as in `complete`."""
        return (await self._answer(ChatRequest, body, key=key, limited=limited))[1]

    async def check(self, kind: type[CompletionRequest] | type[ChatRequest], body: bytes) -> None:
        """Raises the error that `complete` or `chat` would raise for the body before the first token."""
        api_request = parse(kind, body)
        self.model(api_request.model)
        route = await self._route(api_request.model)
        check_number(api_request, route.model.capacity)
        api_request = route.with_defaults(api_request)
        call = partial(route.tokenized, api_request, seed=0)
        tokenized = await self._tokenizing.run(call, characters=api_request.num_characters(len(body)))
        await route.check_grammar(api_request, tokenized.requests)

    async def respond(self, body: Body, *, key: str = "", limited: bool = True) -> ResponseAnswer:
        """The answer to a request of `/v1/responses`; arguments and errors as in `complete`."""
        return ResponseAnswer(*await self._answer(ResponsesRequest, body, key=key, limited=limited))

    async def message(self, body: Body, *, key: str = "", request_id: str | None = None) -> MessageAnswer:
        """The answer to a request of `/v1/messages`; arguments and errors as in `complete`."""
        parsed, answer = await self._answer(MessagesRequest, body, key=key, limited=True)
        return MessageAnswer(parsed, answer, request_id=request_id)

    async def _answer(self, kind: type[G], body: Body, *, key: str, limited: bool) -> tuple[G, ServedAnswer]:
        """The request in a body, and its answer. The request counts as open until the answer is closed."""
        watch = self.measures.on_arrival()
        with watch.errors():
            async with self._refusals.slow_refusals(key):
                request = self._open_requests.begin(key, limited=limited)
            try:
                whole = body if isinstance(body, bytes) else await body()
                watch.on_body()
                parsed = await self._bodies.parse(kind, whole, client=key)
                api_request: ApiRequest = parsed.chat if isinstance(parsed, ChatDialect) else parsed
                characters = api_request.num_characters(len(whole))
                try:
                    return parsed, await self._submit(api_request, characters, key=key, watch=watch, request=request)
                except ApiError as error:
                    if isinstance(parsed, ChatDialect):
                        raise parsed.own_error(error) from error.__cause__
                    raise
            except BaseException:
                request.end()
                raise

    def _count(self, api_request: ApiRequest, request: OpenRequest) -> None:
        """Count a body's choices against its client's limit. Raises `ApiError` or `TooManyRequests` for too many."""
        number, field = api_request.num_prompts, api_request.prompt_field
        if number > self._body_prompts:
            raise FieldError(field, f"{number} prompts in one body; this server takes at most {self._body_prompts}")
        request.take_choices(number, api_request.num_choices, prompt_field=field)

    async def _submit(
        self, api_request: ApiRequest, characters: int, *, key: str, watch: RequestWatch, request: OpenRequest
    ) -> ServedAnswer:
        limit, client = TimeLimit(self._request_seconds), key or api_request.user or ""
        self.model(api_request.model)
        watch.on_model(api_request.model)
        async with limit.watch():
            async with self._refusals.slow_refusals(client) if characters <= LARGE_BODY else nullcontext():
                self._count(api_request, request)
                route = await self._route(api_request.model)
                check_number(api_request, route.model.capacity)
                num_choices = api_request.num_prompts * api_request.num_choices
                route.choices.check(client, num_choices)  # before anything is tokenised
            body = await self._tokenized(route, route.with_defaults(api_request), characters)
            make_texts = partial(route.texts, body)
            is_long = api_request.resume is not None
            texts = await self._tokenizing.run(make_texts, characters=characters) if is_long else make_texts()
        stream = await route.open(body, texts, client=client, limit=limit)
        watch.on_accepted(body.requests)
        return route.answer(body, stream, watch=watch, on_close=request.end)

    async def _tokenized(self, route: ModelRoute, api_request: ApiRequest, characters: int) -> TokenizedBody:
        """The tokenised body, after a check of its grammar."""
        call = partial(route.tokenized, api_request, seed=first_seed(api_request))
        try:
            body = await self._tokenizing.run(call, characters=characters)
        except FieldError as error:
            if error.code == "context_length_exceeded":
                await route.check_long_form(api_request)
            raise
        await route.check_grammar(api_request, body.requests)
        return body

    async def _route(self, name: str) -> ModelRoute:
        """The model's side of a request."""
        if name not in self._routes:
            model = await self._models[name]()
            route = await self._tokenizing.run(partial(ModelRoute, model, self._log), characters=0)
            if self._routes.setdefault(name, route) is not route:  # another request was quicker
                route.stop()
        return self._routes[name]


def served_name(name: str | None, names: Collection[str]) -> str:
    """The requested model. Raises `ApiError` for an unknown model, and for no name if several models are served."""
    if name is None:
        if len(names) > 1:
            why = f"several are served here; name one of {', '.join(names)}"
            raise FieldError("model", why, code="missing_field")
        return next(iter(names))
    if name not in names:
        message = f"unknown model '{clip(name)}'; served here: {', '.join(names)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name
