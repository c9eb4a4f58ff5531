"""OpenAI's API over one model and one engine, without HTTP and without Ray: bodies in, answers out."""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mbd_core.checkpoint.chat import chat_prompt, decode_text
from mbd_core.checkpoint.folder import edit_note
from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.engine.admission import Admitted
from mbd_core.parallel.group import RankLost
from mbd_core.serving.answer import Answer
from mbd_core.serving.async_engine import AsyncEngine
from mbd_core.serving.endpoint_args import EndpointArgs
from mbd_core.serving.engine_requests import engine_requests
from mbd_core.serving.load import load_engine
from mbd_core.serving.logprobs import ChoiceLogprobs, TokenTexts
from mbd_core.serving.open_requests import OpenRequests
from mbd_core.serving.openai_errors import ApiError, clipped
from mbd_core.serving.openai_replies import Reply
from mbd_core.serving.openai_requests import (
    MAX_TOKENS_DEFAULT,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
)
from mbd_core.serving.text_stream import EngineFailed
from mbd_core.trace.recorder import TraceRecorder


class OpenAIServer:
    """One model, one engine. Its methods belong to one event loop; `stop()` ends what it started.

    A server that is to end without cutting answers is drained first: `begin_drain()`, then `drained(seconds)`.
    """

    def __init__(
        self, args: EndpointArgs, *, log: logging.Logger | None = None, trace: TraceRecorder | None = None
    ) -> None:
        """Load the model and capture its graphs. Steps are recorded in `trace`; `stop()` closes it."""
        self.args, self._trace, self._log = args, trace, log or logging.getLogger(__name__)
        self.loaded = load_engine(
            Path(args.folder), args.engine, trace=trace, fp8=args.fp8, tensor_parallel=args.tensor_parallel
        )
        self.loaded.prepare()
        self.defaults = {**asdict(self.loaded.decoding({})), "temperature": 0, "max_tokens": MAX_TOKENS_DEFAULT}
        tokenizer = self.loaded.tokenizer
        # A fast tokenizer switches padding and truncation off in its first call. After that its users, this thread
        # for prompts, the engine's for text, only read it.
        tokenizer.encode("")
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._decode = partial(decode_text, tokenizer)
        self._token_texts = TokenTexts(tokenizer)
        self.engine = AsyncEngine(self.loaded.engine, self._decode, max_waiting=args.max_waiting)
        self._open_requests = OpenRequests()
        self._created = int(time.time())
        self._edit_noted = False

    def begin_drain(self) -> int:
        """Refuse new requests with 503 from now on; those that run or wait go on. Returns how many these are."""
        return self._open_requests.begin_drain()

    async def drained(self, seconds: float) -> int:
        """Wait until every answer has ended, for `seconds` at most; how many have not. Call `begin_drain` first."""
        return await self._open_requests.drained(seconds)

    async def stop(self) -> None:
        """End the engine and its threads, and write the end of the trace."""
        await self.engine.stop()
        await asyncio.to_thread(self._tokenizing.shutdown)
        await asyncio.to_thread(self.loaded.close)
        if self._trace is not None:
            self._trace.close()

    # -- what is served -----------------------------------------------------------------------------------------

    def describe(self) -> str:
        """One line: device, attention kernel and why no other, KV memory, the decoding of a plain request."""
        engine = self.loaded.engine
        defaults = ", ".join(f"{name}={value}" for name, value in self.defaults.items() if value is not None)
        return (
            f"{self.args.name}: {self.loaded.backend}; {engine.attention.describe()}; "
            f"KV memory: {engine.kv_tokens:,} tokens in {engine.num_pages:,} pages; defaults: {defaults}"
        )

    def check_health(self) -> None:
        """Raises `EngineFailed` or `RankLost` if no request can be served any more; never waits."""
        self.engine.check_health()
        self.loaded.check_health()

    def health(self) -> dict[str, Any]:
        """Whether requests are taken, how many are served, and by what."""
        try:
            self.check_health()
            ready = not self._open_requests.draining
        except (EngineFailed, RankLost):
            ready = False
        engine, load = self.loaded.engine, self.engine.load
        pool = engine.scheduler.pool
        return {
            "model": self.args.name,
            "ready": ready,
            "draining": self._open_requests.draining,
            "running": load.running,
            "waiting": load.waiting,
            "backend": self.loaded.backend,
            "tensor_parallel": self.args.tensor_parallel,
            "attention": {"name": engine.attention.name, "not_chosen": engine.attention.reasons},
            "defaults": self.defaults,
            "engine": asdict(engine.config) | {"block_size": engine.block_size, "page_size": engine.page_size},
            "kv_cache": {"num_pages": engine.num_pages, "page_size": engine.page_size, "tokens": engine.kv_tokens},
            "graphs": engine.graph_report(),
            "prefix_cache": {"looked_up": pool.lookups, "found": pool.hits},
        }

    def models(self) -> dict[str, Any]:
        """The list of models, which is this one."""
        return {"object": "list", "data": [self.model(self.args.name)]}

    def model(self, name: str) -> dict[str, Any]:
        """OpenAI's model object; `ApiError` (404) for a name that is not this model's."""
        if name != self.args.name:
            message = f"unknown model '{clipped(name)}'; served here: {self.args.name}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return {"id": name, "object": "model", "created": self._created, "owned_by": "mbd"}

    # -- requests -----------------------------------------------------------------------------------------------

    async def complete(self, body: bytes) -> Answer:
        """The answer to a completion request; raises `ApiError`, `TooManyRequests` and `EngineFailed`."""
        return await self._answer(CompletionRequest, body, prompt_field="prompt")

    async def chat(self, body: bytes) -> Answer:
        """The answer to a chat request; raises as `complete` does."""
        return await self._answer(ChatRequest, body, prompt_field="messages")

    async def _answer(
        self, kind: type[CompletionRequest] | type[ChatRequest], body: bytes, *, prompt_field: str
    ) -> Answer:
        """The answer, whose request stays open until it is closed."""
        end_request = self._open_requests.begin()
        try:
            return await self._submit(parse(kind, body), prompt_field=prompt_field, on_close=end_request)
        except BaseException:
            end_request()
            raise

    async def _submit(
        self, asked: CompletionRequest | ChatRequest, *, prompt_field: str, on_close: Callable[[], None]
    ) -> Answer:
        self.model(asked.model)
        seed = 0 if not asked.draws else secrets.randbits(32) if asked.seed is None else asked.seed
        admitted = await asyncio.get_running_loop().run_in_executor(
            self._tokenizing, partial(self._admit, asked, prompt_field=prompt_field, seed=seed)
        )
        stream = self.engine.submit(admitted, stop=asked.stop_strings)
        chat = isinstance(asked, ChatRequest)
        reply = Reply(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.args.name,
            chat=chat,
            num_choices=asked.num_choices,
            seed=seed if asked.draws else None,
        )
        logprobs = None
        if asked.wants_logprobs:
            logprobs = [ChoiceLogprobs(self._token_texts, self._decode, chat=chat) for _ in admitted]
        return Answer(
            reply,
            stream,
            streamed=bool(asked.stream),
            logprobs=logprobs,
            include_usage=asked.usage_in_stream,
            on_close=on_close,
        )

    def _admit(self, asked: CompletionRequest | ChatRequest, *, prompt_field: str, seed: int) -> list[Admitted]:
        """In the tokenizer's thread: prompts to ids, and the requests that the engine takes."""
        prompts = self._chat_prompts(asked) if isinstance(asked, ChatRequest) else self._plain_prompts(asked)
        return engine_requests(
            asked,
            prompts,
            prompt_field=prompt_field,
            decoding=self._decoding(asked),
            seed=seed,
            admission=self.loaded.engine.admission,
            capacity=self.engine.capacity,
        )

    def _plain_prompts(self, asked: CompletionRequest) -> list[list[int]]:
        encode = self.loaded.tokenizer.encode
        return [list(encode(prompt)) if isinstance(prompt, str) else prompt for prompt in asked.prompts]

    def _chat_prompts(self, asked: ChatRequest) -> list[list[int]]:
        try:
            return [chat_prompt(self.loaded.tokenizer, asked.turns)]
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from None

    def _decoding(self, asked: GenerationRequest) -> DecodingConfig:
        try:
            decoding = self.loaded.decoding(asked.decoding or {})
        except ValueError as error:
            raise ApiError(400, f"decoding: {error}", param="decoding", code="invalid_value") from None
        note = None if self._edit_noted else edit_note(self.args.name, self.loaded.defaults, decoding)
        if note is not None:
            self._edit_noted = True
            self._log.warning(note)
        return decoding
