"""An engine with the endpoint's API in this process, without HTTP; its event loop runs in its own thread.

The endpoint's code parses, templates, admits and decodes each request, so the answers equal the endpoint's.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, wait
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

from mbd_core.decoding.answers.slots import Frame
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.serving.api.errors import ApiError
from mbd_core.serving.api.requests import ChatRequest, CompletionRequest
from mbd_core.serving.api.shapes import Completion
from mbd_core.serving.server.engine_service import EngineService
from mbd_core.serving.server.openai_server import OpenAIServer
from mbd_core.serving.server.text_stream import TextStep
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.served_model import ServedModel
from mbd_core.serving.tokens.stream import EngineFailed, TooManyRequests

T = TypeVar("T")
LOOK_SECONDS = 0.5  # the interval at which a wait wakes: another thread may have received Ctrl-C's signal
AGAIN_SECONDS = 0.1  # between two tries to send a request to a full engine
RequestKind = type[ChatRequest] | type[CompletionRequest]


class TracedReply(NamedTuple):
    """The endpoint's reply to a body, and the frames of its forwards if `trace` was set."""

    completion: Completion
    frames: list[Frame]


class Session:
    """A loaded model. Any thread may call it; `close()` ends its threads and processes."""

    def __init__(self, args: EndpointArgs) -> None:
        self.service = EngineService(args)
        self.server = OpenAIServer({args.served_name: self._model})
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self.closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"LLM {args.served_name}", daemon=True)
        self._thread.start()

    async def _model(self) -> ServedModel:
        return self.service.served_model()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. An interruption of the wait (Ctrl-C) cancels the
        coroutine.

        Raises `ValueError` for a bad request, and `RuntimeError` if the engine fails or is closed.
        """
        if self.closed:
            work.close()
            raise RuntimeError("this LLM is closed; make another one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not future.done():
                if self._loop.is_closed():  # before the work began
                    raise RuntimeError("this LLM was closed meanwhile")
                wait([future], LOOK_SECONDS)
            return future.result()
        except ApiError as error:
            raise plain_error(error) from None
        except EngineFailed as error:
            raise RuntimeError("this LLM was closed meanwhile" if self.closed else str(error)) from error
        except CancelledError:  # by `_stop`
            raise RuntimeError("this LLM was closed meanwhile") from None
        finally:
            future.cancel()

    def start(self, work: Coroutine[Any, Any, None]) -> Callable[[], Any]:
        """Start a coroutine on the loop. Returns a function that cancels it."""
        if self.closed:
            work.close()
            raise RuntimeError("this LLM is closed; make another one")
        return asyncio.run_coroutine_threadsafe(work, self._loop).cancel

    def check(self, decoding: DecodingConfig) -> None:
        """Raise `ValueError` for a decoding that the model or its engine does not support."""
        self.service.limits.admission.check(Request(request_id="", prompt=(0,), max_tokens=1, decoding=decoding))

    async def ask_all(
        self,
        kind: RequestKind,
        bodies: Sequence[bytes],
        *,
        n: int,
        field: str,
        trace: bool,
        on_answer: Callable[[], object],
    ) -> list[TracedReply]:
        """The replies to `bodies`, where `n` bodies in a row share a prompt. All bodies are checked before the first
        is decoded, and `on_answer` is called with each reply.

        `field` is the prompt's field: an error in this field gives the number of the bad prompt.
        """
        for number, body in enumerate(bodies[::n] if len(bodies) > 1 else (), start=1):
            try:
                await self.server.check(kind, body)
            except ApiError as error:
                of_prompt = len(bodies) > n and (error.param or "").partition(".")[0] == field
                raise ValueError(error.message + f" (number {number} of {len(bodies) // n})" * of_prompt) from None
        turns = asyncio.Lock()
        tasks = [asyncio.create_task(self.ask(kind, body, trace=trace, turns=turns)) for body in bodies]
        for task in tasks:
            task.add_done_callback(lambda _: on_answer())
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def ask(
        self,
        kind: RequestKind,
        body: bytes,
        *,
        trace: bool = False,
        on_step: Callable[[TextStep, str], None] | None = None,
        turns: asyncio.Lock | None = None,
    ) -> TracedReply:
        """The endpoint's reply to a body, and with `trace` its frames; `on_step` is called with each step and its
        content.

        Bodies that share the lock `turns` are sent one after the other, each as soon as the engine has room.
        """
        complete = self.server.chat if kind is ChatRequest else self.server.complete
        frames: list[Frame] = []
        while True:
            try:
                async with turns or nullcontext():
                    answer = await complete(body, limited=False)
                    break
            except TooManyRequests:  # other threads fill the engine
                await asyncio.sleep(AGAIN_SECONDS)

        def see(step: TextStep, content: str) -> None:
            if step.frame is not None:
                frames.append(step.frame)
            if on_step is not None:
                on_step(step, content)

        try:
            return TracedReply(await (answer.whole(see) if trace or on_step is not None else answer.whole()), frames)
        finally:
            answer.close()

    def close(self) -> None:
        """End the engine, its threads and processes; running requests raise `RuntimeError`.

        A second call does nothing.
        """
        with self._closing:
            if self.closed:
                return
            self.closed = True
            with suppress(RuntimeError):  # at the end of the interpreter no thread takes work any more
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self.service.loaded.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _stop(self) -> None:
        await self.service.stop()
        await self.server.stop()
        waiting = asyncio.all_tasks() - {asyncio.current_task()}  # such as requests that wait for room
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def plain_error(error: ApiError) -> Exception:
    """The Python exception for an error of the endpoint."""
    return ValueError(error.message) if error.status < 500 else RuntimeError(error.message)
