"""A model as the API sees it: name, tokenizer, limits, source of tokens, and compiler of grammars."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from mbd_core.checkpoint.folder import edit_note
from mbd_core.decoding.blocks.config import DecodingConfig, decoding_config
from mbd_core.decoding.blocks.methods import SpeedFront, read_front
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.grammar.guide import Guide
from mbd_core.engine.sequences.admission import Admission, RequestRefused
from mbd_core.serving.tokens.stream import TokenSource


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The limits and defaults of an engine, for senders of requests.

    generation  the model's `generation_config.json`, with the engine's block size if no block size was trained
    sampling    the model's defaults for sampling and `max_tokens` of a request (`sampling_defaults`)
    rows        sequences decoded at once
    capacity    requests that may run and wait together
    draft_model  the name of its draft model, if it has one
    """

    admission: Admission
    block_size: int
    generation: Mapping[str, Any]
    sampling: Mapping[str, float]
    rows: int
    capacity: int
    draft_model: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that the server offers.

    limits       the limits of one engine
    num_engines  the largest number of engines
    adapter      the LoRA adapter with this name, if the name is an adapter's
    call_form    the name of the form of the model's calls; `None`: recognised from the chat template
    may_grow     whether more engines may start; then refused requests wait, up to the capacity of all engines
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    limits: EngineLimits
    source: TokenSource
    num_engines: int = 1
    adapter: str | None = None
    call_form: str | None = None
    may_grow: bool = False

    @property
    def capacity(self) -> int:
        """Requests that all engines together take at once."""
        return self.num_engines * self.limits.capacity

    @cached_property
    def speed_front(self) -> SpeedFront | None:
        """The model's measured front, if it has one."""
        return read_front(self.limits.generation, block_size=self.limits.block_size)

    def decoding(self, overrides: Mapping[str, Any]) -> DecodingConfig:
        """The model's defaults, overridden by a request's own fields. Raises `ValueError` for an unsupported field."""
        return decoding_config(self.limits.generation, overrides, block_size=self.limits.block_size)

    def edit_note(self, decoding: DecodingConfig) -> str | None:
        """The note on T2T for a model that was not trained for T2T."""
        return edit_note(self.name, self.limits.generation, decoding)


# Compiling grammars in separate threads, beside the event loop and the engine, in bounded time.

SECONDS = 10.0
THREADS = 2


class GrammarCompiler:
    """`compile` for coroutines; its threads start with the first grammar."""

    def __init__(self, compile: Callable[[Request], Guide | None], *, seconds: float = SECONDS) -> None:
        self._compile, self._seconds = compile, seconds
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="grammar")

    async def __call__(self, request: Request) -> Guide | None:
        """A request's compiled grammar, `None` if it has no grammar. Raises `RequestRefused`."""
        if request.grammar is None:
            return None
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, request)
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(compiling)
        except TimeoutError:
            compiling.add_done_callback(lambda future: future.cancelled() or future.exception())
            why = f"{request.grammar.subject()}: not compiled within {self._seconds:g} s; simplify it or try again"
            raise RequestRefused("grammar", why) from None

    def stop(self) -> None:
        """End the threads as soon as they are idle; does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)
