"""OpenAI's API over served models, without HTTP and without Ray: bodies in, answers out."""

import asyncio
import logging
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from mbd_core.checkpoint.chat import decode_text, unknown_variables
from mbd_core.checkpoint.tokenizer import grammars_of
from mbd_core.decoding.answers.piece import Piece
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.methods import SpeedPoint
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.admission import RequestRefused, compile_guide, penalties_refused
from mbd_core.serving.api.access import OpenRequest, OpenRequests
from mbd_core.serving.api.engine_requests import (
    TokenizerThreads,
    chat_ids,
    check_calls,
    check_number,
    committed_texts,
    detokenize,
    engine_requests,
    grammar_of,
    text_ids,
    tokenize,
    tokenizer_info,
)
from mbd_core.serving.api.errors import AGAIN_SECONDS, ApiError, FieldError, clip
from mbd_core.serving.api.fields import Template, TemplateTokens, template_tokens
from mbd_core.serving.api.parsing import MAX_PROMPTS, parse
from mbd_core.serving.api.replies import Reply
from mbd_core.serving.api.requests import (
    MAX_TOKENS_DEFAULT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from mbd_core.serving.api.responses import ResponsesRequest, own_error
from mbd_core.serving.api.shapes import Model, Models, TokenIds, TokenizerInfo, TokenText
from mbd_core.serving.server.answer import ServedAnswer, token_details
from mbd_core.serving.server.measures import RequestWatch, ServerMeasures
from mbd_core.serving.server.prompt_scores import PromptScores, score_requests
from mbd_core.serving.server.response_answer import ResponseAnswer
from mbd_core.serving.server.text_stream import ClientPlaces, OpenChoices, TextStream
from mbd_core.serving.text.logprobs import ChoiceLogprobs, TokenTexts
from mbd_core.serving.tokens.served_model import GrammarCompiler, ServedModel
from mbd_core.serving.tokens.stream import FairTurns, Refusals, TimeLimit, TooManyRequests, has_room

Body = bytes | Callable[[], Awaitable[bytes]]
ApiRequest = CompletionRequest | ChatRequest
K = TypeVar("K", CompletionRequest, ChatRequest, ResponsesRequest)

LARGE_BODY = 2**17  # bytes: parsing more takes the event loop for many milliseconds
MOST_LARGE = 16  # large bodies that may wait to be parsed
MOST_SLOWED = 64  # refusals that last, each with its connection and its body
REST = 5.0  # seconds of the event loop that a large body leaves to others for each one that its parsing takes
PLACES = 2  # choices of a client that the engines know at once, for each of their batch rows


class OpenAIServer:
    """The models by the names that clients call them. Its methods belong to one event loop.

    A server that is to end without cutting answers is drained first: `begin_drain()`, then
    `wait_until_drained(seconds)`.
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
        """`models` gives each model when it is first asked for; an answer may take `request_seconds` from the arrival
        of its request's whole body on. A client may have `client_requests` choices under way, and a body
        `body_prompts` prompts. `measures` are told of every request."""
        self._models, self._request_seconds, self._body_prompts = dict(models), request_seconds, body_prompts
        self._log = log or logging.getLogger(__name__)
        self.measures = measures or ServerMeasures(self._models)
        self._routes: dict[str, _Route] = {}
        self._learning: dict[str, asyncio.Future[_Route]] = {}
        self._open_requests = OpenRequests(most_each=client_requests)
        self._created = int(time.time())
        self._tokenizing = TokenizerThreads()
        self._bodies = _LargeBodies()
        self._refusals = Refusals(seconds=AGAIN_SECONDS, most=MOST_SLOWED)

    def offer(self, models: Mapping[str, Callable[[], Awaitable[ServedModel]]]) -> None:
        """Serve these models from now on; requests under way go on."""
        self._models = dict(models)
        self._routes = {name: route for name, route in self._routes.items() if name in models}
        for name in models.keys() - self.measures.by_model.keys():
            self.measures.add(name)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._open_requests.draining

    def begin_drain(self) -> int:
        """Refuse new requests with 503 from now on; those that run or wait go on. Returns how many these are."""
        return self._open_requests.begin_drain()

    async def wait_until_drained(self, seconds: float) -> int:
        """Wait until every answer has ended, for `seconds` at most; how many have not. Call `begin_drain` first."""
        return await self._open_requests.wait_until_drained(seconds)

    async def stop(self) -> None:
        """End its threads; no request may follow."""
        for route in self._routes.values():
            route.stop()
        await asyncio.to_thread(self._tokenizing.shutdown)

    # -- what is served -----------------------------------------------------------------------------------------

    def models(self) -> Models:
        """The list of models."""
        return {"object": "list", "data": [self.model(name) for name in self._models]}

    def model(self, name: str) -> Model:
        """OpenAI's model object; `ApiError` (404) for a name that is not served."""
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
        """Ask the engines of these models for their limits where they are unknown, and wait for `seconds` at most."""
        for name in names:
            if name in self._models and name not in self._routes and name not in self._learning:
                task = asyncio.ensure_future(self._route(name))
                self._learning[name] = task
                task.add_done_callback(partial(self._learned, name))
        if tasks := [self._learning[name] for name in names if name in self._learning]:
            await asyncio.wait(tasks, timeout=seconds)

    def _learned(self, name: str, task: "asyncio.Future[_Route]") -> None:
        del self._learning[name]
        if not task.cancelled() and task.exception() is not None:
            self._log.warning("%s did not tell its limits", name, exc_info=task.exception())

    # -- the tokenizer ------------------------------------------------------------------------------------------

    async def tokenize(self, body: bytes) -> TokenIds:
        """The token ids of a text or a chat; raises as `complete` does."""
        api_request = parse(TokenizeRequest, body)
        async with TimeLimit(self._request_seconds).watch():
            model = (await self._route(served_name(api_request.model, self._models))).model
            return await self._tokenizing.run(partial(tokenize, api_request, model), characters=len(body))

    async def detokenize(self, body: bytes) -> TokenText:
        """The text of token ids; raises as `complete` does."""
        order = parse(DetokenizeRequest, body)
        async with TimeLimit(self._request_seconds).watch():
            call = partial(
                detokenize, order, (await self._route(served_name(order.model, self._models))).model.tokenizer
            )
            return await self._tokenizing.run(call, characters=len(order.tokens))

    async def tokenizer_info(self, name: str | None) -> TokenizerInfo:
        """The special tokens and the chat template; raises as `complete` does."""
        async with TimeLimit(self._request_seconds).watch():
            return tokenizer_info((await self._route(served_name(name, self._models))).model.tokenizer)

    # -- requests -----------------------------------------------------------------------------------------------

    async def complete(self, body: Body, *, key: str = "", limited: bool = True) -> ServedAnswer:
        """The answer to a completion request; clients of different `key` take turns where requests wait.

        Unless `limited`, a key may have any number of choices under way. A body that is still to be read counts as one
        choice of its client from now on. Raises `ApiError`,
        `TooManyRequests`, `EngineFailed` and `RequestTimedOut`.
        """
        return (await self._answer(CompletionRequest, body, key=key, limited=limited))[1]

    async def chat(self, body: Body, *, key: str = "", limited: bool = True) -> ServedAnswer:
        """The answer to a chat request; as `complete`."""
        return (await self._answer(ChatRequest, body, key=key, limited=limited))[1]

    async def check(self, kind: type[CompletionRequest] | type[ChatRequest], body: bytes) -> None:
        """Raise what `complete` or `chat` would raise of the body before its first token."""
        api_request = parse(kind, body)
        self.model(api_request.model)
        route = await self._route(api_request.model)
        check_number(api_request, route.model.capacity)
        api_request = route.with_defaults(api_request)
        call = partial(route.requests, api_request, seed=0)
        requests, _, _ = await self._tokenizing.run(call, characters=api_request.num_characters(len(body)))
        await route.check_grammar(api_request, requests)

    async def respond(self, body: Body, *, key: str = "", limited: bool = True) -> ResponseAnswer:
        """The answer to a request of `/v1/responses`; as `complete`."""
        return ResponseAnswer(*await self._answer(ResponsesRequest, body, key=key, limited=limited))

    async def _answer(self, kind: type[K], body: Body, *, key: str, limited: bool) -> tuple[K, ServedAnswer]:
        """The request in a body, and its answer, whose request stays open until it is closed."""
        watch = self.measures.on_arrival()
        with watch.errors():
            async with self._refusals.slow_refusals(key):
                request = self._open_requests.begin(key, limited=limited)
            try:
                whole = body if isinstance(body, bytes) else await body()
                watch.on_body()
                parsed = await self._bodies.parse(kind, whole, client=key)
                api_request = parsed.chat if isinstance(parsed, ResponsesRequest) else parsed
                characters = api_request.num_characters(len(whole))
                return parsed, await self._submit(api_request, characters, key=key, watch=watch, request=request)
            except ApiError as error:
                request.end()
                if kind is ResponsesRequest:
                    raise own_error(error) from error.__cause__
                raise
            except BaseException:
                request.end()
                raise

    def _count(self, api_request: ApiRequest, request: OpenRequest) -> None:
        """Count a body's choices among its client's; `ApiError` and `TooManyRequests` for too many of them."""
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
                route.choices.check(
                    client, api_request.num_prompts * api_request.num_choices
                )  # before anything is tokenised
            api_request = route.with_defaults(api_request)
            seed = _seed(api_request)
            call = partial(route.requests, api_request, seed=seed)
            try:
                requests, template, echoes = await self._tokenizing.run(call, characters=characters)
            except FieldError as error:
                if error.code == "context_length_exceeded":
                    await route.check_long_form(api_request)
                raise
            await route.check_grammar(api_request, requests)
            rule = api_request.call_rule if isinstance(api_request, ChatRequest) else None
            decode = route.decode if rule is None else route.decode_all
            make_texts = partial(committed_texts, requests, decode, api_request.stop_strings)
            texts = (
                make_texts()
                if api_request.resume is None
                else await self._tokenizing.run(make_texts, characters=characters)
            )
        with route.choices.opening(client, len(requests)):
            stream = await TextStream.open(
                route.model.source,
                requests,
                texts=texts,
                key=client,
                places=route.places,
                limit=limit,
                waits=route.model.may_grow,
            )
            route.choices.add(client, stream)
        chat = isinstance(api_request, ChatRequest)
        new_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        reply = Reply(
            id=new_id if api_request.resume is None else api_request.resume.id,
            created=int(time.time()),
            model=api_request.model,
            chat=chat,
            num_choices=api_request.num_choices,
            seed=seed if api_request.draws else None,
            speed=None if api_request.speed is None else route.point(api_request.speed)[0],
            notes=route.notes(api_request),
        )
        watch.on_accepted(requests)
        if isinstance(api_request, CompletionRequest) and api_request.scores_prompt:
            return PromptScores(
                api_request,
                reply,
                stream,
                texts=route.token_texts,
                decode=route.decode,
                details=token_details(api_request, None, route.decode),
                echoes=echoes,
                watch=watch,
                on_close=request.end,
            )
        logprobs = None
        if api_request.wants_logprobs:
            logprobs = [ChoiceLogprobs(route.token_texts, route.decode, chat=chat) for _ in requests]
            for choice, begun_request in zip(logprobs, requests, strict=True):  # text_offset goes on behind these
                begun = begun_request.committed
                choice.add(Piece(tokens=begun, logprobs=(0.0,) * len(begun)))
        return ServedAnswer(
            reply,
            stream,
            streamed=bool(api_request.stream),
            logprobs=logprobs,
            details=token_details(api_request, template, route.decode),
            calls=rule,
            echoes=() if api_request.resume else echoes,
            texts=route.token_texts if api_request.frames else None,
            resumable=bool(api_request.resumable),
            usage=api_request.usage_in_stream,
            watch=watch,
            on_close=request.end,
        )

    async def _route(self, name: str) -> "_Route":
        """The model's side of a request."""
        if name not in self._routes:
            model = await self._models[name]()
            route = await self._tokenizing.run(partial(_Route, model, self._log), characters=0)
            if self._routes.setdefault(name, route) is not route:  # another request's was quicker
                route.stop()
        return self._routes[name]


def served_name(name: str | None, names: Collection[str]) -> str:
    """The model that is meant; `ApiError` for an unknown one, and where none is named of several."""
    if name is None:
        if len(names) > 1:
            why = f"several are served here; name one of {', '.join(names)}"
            raise FieldError("model", why, code="missing_field")
        return next(iter(names))
    if name not in names:
        message = f"unknown model '{clip(name)}'; served here: {', '.join(names)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name


def _seed(api_request: ApiRequest) -> int:
    """Of the first choice; where tokens are drawn without one, any."""
    if api_request.resume is not None and api_request.resume.seed is not None:
        return api_request.resume.seed
    if not api_request.draws:
        return 0
    return secrets.randbits(32) if api_request.seed is None else api_request.seed


class _LargeBodies:
    """Parses bodies on the event loop: large ones one at a time, and with rests, in which the others go on."""

    def __init__(self) -> None:
        self._turns = FairTurns(1, seconds=60.0)
        self._waiting: Counter[str] = Counter()
        self._next_parse = 0.0  # when the next may be parsed, on the clock of the loop

    async def parse(self, kind: type[K], body: bytes, *, client: str) -> K:
        """The request in a body; raises as `parse`, and `TooManyRequests` where many large ones wait."""
        if len(body) <= LARGE_BODY:
            return parse(kind, body)
        if not has_room(self._waiting, client, 1, capacity=MOST_LARGE):
            raise TooManyRequests(f"{self._waiting.total()} large bodies wait to be read; try again later")
        self._waiting[client] += 1
        try:
            async with self._turns.turn((client,)):
                clock = asyncio.get_running_loop().time
                await asyncio.sleep(max(0.0, self._next_parse - clock()))
                start = clock()
                try:
                    return parse(kind, body)
                finally:
                    self._next_parse = clock() + REST * (clock() - start)
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]


class _Route:
    """From a parsed request to the requests of one model's engine, and back from tokens to text."""

    def __init__(self, model: ServedModel, log: logging.Logger) -> None:
        """Called in the tokenizer's thread."""
        self.model, self._log = model, log
        self.choices = OpenChoices(model.capacity)
        self.places = ClientPlaces(PLACES * model.num_engines * model.limits.rows)
        model.tokenizer.encode("")  # its first call switches padding and truncation off, which no two threads may do
        self.decode = partial(decode_text, model.tokenizer)
        self.decode_all = partial(decode_text, model.tokenizer, special=True)
        self.token_texts = TokenTexts(model.tokenizer)
        self._edit_noted = False
        grammars = grammars_of(model.tokenizer, model.limits.admission.model)
        self._compile = GrammarCompiler(partial(compile_guide, grammars))

    def requests(
        self, api_request: ApiRequest, *, seed: int
    ) -> tuple[list[Request], TemplateTokens | None, list[str]]:
        """In the tokenizer's thread: prompts to ids, one request for each prompt and choice, their template, and the
        text before each."""
        read_prompts = self._read(api_request)
        if isinstance(api_request, CompletionRequest) and api_request.scores_prompt:
            requests = score_requests(api_request, read_prompts(), self.model, seed=seed)
            return requests, None, api_request.echoes(self.decode)
        template = None
        if isinstance(api_request, CompletionRequest) and api_request.template is not None:
            template = self._template(api_request.template, parse_special=bool(api_request.parse_special))
        requests = engine_requests(
            api_request,
            read_prompts(),
            decoding=self._decoding(api_request),
            seed=seed,
            admission=self.model.limits.admission,
            adapter=self.model.adapter,
            template=template,
            added_tokens=self.model.tokenizer.get_added_vocab(),
            default_max_tokens=int(self.model.limits.sampling.get("max_tokens", MAX_TOKENS_DEFAULT)),
        )
        echoes = api_request.echoes(self.decode) if isinstance(api_request, CompletionRequest) else []
        return requests, template, echoes

    def with_defaults(self, api_request: ApiRequest) -> ApiRequest:
        """The request with the model's own sampling where it says nothing; its default penalty gives way to a decoding
        that takes none. A prompt is scored without them."""
        if isinstance(api_request, CompletionRequest) and api_request.scores_prompt:
            return api_request
        defaults = {name: value for name, value in self.model.limits.sampling.items() if name != "max_tokens"}
        if "repetition_penalty" in defaults and penalties_refused(self._decoding(api_request)):
            del defaults["repetition_penalty"]
        absent = {name: value for name, value in defaults.items() if getattr(api_request, name) is None}
        return api_request.model_copy(update=absent) if absent else api_request

    def _read(self, api_request: ApiRequest) -> Callable[[], list[list[int]]]:
        if isinstance(api_request, ChatRequest):
            return partial(self._chat_prompts, api_request)
        return partial(self._plain_prompts, api_request)

    def _template(self, parts: Template, *, parse_special: bool) -> TemplateTokens:
        encode = partial(text_ids, self.model, field="template", special=False, parse_special=parse_special)
        return template_tokens(parts, encode, limit=self.model.limits.admission.max_length)

    def stop(self) -> None:
        """End its threads."""
        self._compile.stop()

    async def check_grammar(self, api_request: GenerationRequest, requests: list[Request]) -> None:
        """Refuse a grammar that no engine could honour, before one is asked; `ApiError` (400) names the field."""
        try:
            await self._compile(min(requests, key=lambda r: r.max_tokens))
        except RequestRefused as error:
            raise FieldError(api_request.grammar_field or "", str(error), code=error.code) from None

    async def check_long_form(self, api_request: GenerationRequest) -> None:
        """As `check_grammar`, of a request whose prompt is too long: a shorter one would not help a wrong grammar."""
        grammar = grammar_of(api_request, self.model.tokenizer.get_added_vocab())
        if grammar is not None:
            length = self.model.limits.admission.max_length
            decoding = self._decoding(api_request)
            request = Request(request_id="", prompt=(0,), max_tokens=length, decoding=decoding, grammar=grammar)
            await self.check_grammar(api_request, [request])

    def _plain_prompts(self, api_request: CompletionRequest) -> list[list[int]]:
        encode = partial(
            text_ids, self.model, field="prompt", special=True, parse_special=bool(api_request.parse_special)
        )
        return [encode(p) if isinstance(p, str) else p for p in api_request.prompts]

    def _chat_prompts(self, api_request: ChatRequest) -> list[list[int]]:
        if api_request.call_rule is not None:
            check_calls(self.model)
        return [chat_ids(self.model, api_request.turns, api_request, tools=api_request.shown_tools)]

    def notes(self, api_request: ApiRequest) -> list[str]:
        """The fields that were taken and have no effect."""
        if not isinstance(api_request, ChatRequest):
            return api_request.notes
        unknown = partial(unknown_variables, self.model.tokenizer)
        return [*api_request.notes, *api_request.template_notes(unknown)]

    def point(self, speed: float) -> tuple[float, SpeedPoint]:
        """The point of the model's front at `speed`, and its own speed; `ApiError` (400) where there is no front."""
        front = self.model.speed_front
        if front is None:
            raise FieldError(
                "speed",
                "this model has no measured front",
                remedy="measure one with jobs/eval_sweep.py and put it into the model's folder with "
                "jobs/report_sweep.py front, or give decoding",
            )
        return front.at(speed)

    def _decoding(self, api_request: GenerationRequest) -> DecodingConfig:
        if api_request.speed is not None:
            return self.model.decoding(self.point(api_request.speed)[1].decoding)
        try:
            decoding = self.model.decoding(api_request.decoding or {})
        except ValueError as error:
            raise FieldError("decoding", str(error)) from None
        note = None if self._edit_noted else self.model.edit_note(decoding)
        if note is not None:
            self._edit_noted = True
            self._log.warning(note)
        return decoding
