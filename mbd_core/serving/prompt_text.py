"""Prompts' texts to token ids at a bounded cost, off the event loop.

Tokenising takes about a second for each few hundred thousand characters. So a text that cannot fit is refused after
its first part, and long texts have a thread of their own, where no short one waits behind them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mbd_core.checkpoint.chat import chat_text
from mbd_core.checkpoint.literal_text import MaskedText, literal, token_ids
from mbd_core.checkpoint.tool_turns import check_form
from mbd_core.serving.openai_errors import ApiError
from mbd_core.serving.served_model import ServedModel
from mbd_core.serving.token_stream import TooManyRequests

LONG = 20_000  # characters of a request from which on it is long
MOST_LONG = 16  # long requests that may wait for their thread
PART = 8  # characters for each token of the limit: where a text has fewer tokens, the next part is looked at
GROWTH = 4  # of the parts
MARGIN = 256  # tokens that a part may have beyond the limit, because it ends within a word

Encode = Callable[[str], list[int]]
T = TypeVar("T")


class TextTooLong(ValueError):
    """A text has more tokens than fit."""


def bounded_ids(encode: Encode, text: str, *, limit: int) -> list[int]:
    """The ids of `text`; `TextTooLong` for one of more than about `limit` tokens, once a part of it shows that."""
    end = PART * limit + MARGIN
    while end < len(text):
        if len(encode(text[:end])) > limit + MARGIN:
            raise TextTooLong(f"{len(text)} characters are more than {limit} tokens, which is the limit in all")
        end *= GROWTH
    return encode(text)


def text_ids(
    model: ServedModel, text: str | MaskedText, *, field: str, special: bool, parse_special: bool = False
) -> list[int]:
    """The ids of a text that came in `field`, with or without the tokenizer's special tokens around it.

    Control tokens that a client's own text spells are text, unless it is to be parsed (`parse_special`); a chat's text
    is masked already. Raises `ApiError` (400) for a text that has far too many; the engine refuses one that has a few
    too many.
    """
    masked = text
    if isinstance(masked, str):
        masked = MaskedText(masked) if parse_special else literal(model.tokenizer, masked)

    def encode(part: str) -> list[int]:
        part_ids = token_ids(model.tokenizer, [MaskedText(part, masked.masking)], add_special_tokens=special)
        return part_ids[0]

    try:
        return bounded_ids(encode, masked.text, limit=model.limits.admission.max_length)
    except TextTooLong as error:
        raise ApiError(400, f"{field}: {error}", param=field, code="context_length_exceeded") from None


def chat_ids(
    model: ServedModel,
    turns: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    special: bool = False,
) -> list[int]:
    """The ids of a chat in the model's template; raises as `text_ids`, and for what the template refuses."""
    try:
        text = chat_text(model.tokenizer, turns, tools=tools)
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from None
    return text_ids(model, text, field="messages", special=special)


def check_calls(model: ServedModel) -> None:
    """Raise `ApiError` (400) for a model whose calls of tools could not be told from text."""
    try:
        check_form(model.tokenizer.get_chat_template() if model.tokenizer.chat_template else "")
    except ValueError as error:
        raise ApiError(400, f"tools: {error}", param="tools", code="invalid_value") from None


class TokenizerThreads:
    """Two threads that tokenise: one for short texts, one for long ones.

    A fast tokenizer can be used in both at once after its first call, which sets it up.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-long")
        self._num_long = 0

    async def run(self, call: Callable[[], T], *, characters: int) -> T:
        """The result of `call`, which tokenises so many characters; `TooManyRequests` where many long ones wait."""
        loop = asyncio.get_running_loop()
        if characters <= LONG:
            return await loop.run_in_executor(self._short, call)
        if self._num_long >= MOST_LONG:
            raise TooManyRequests(f"{MOST_LONG} requests with long prompts are being read; try again later")
        self._num_long += 1
        try:
            return await loop.run_in_executor(self._long, call)
        finally:
            self._num_long -= 1

    def shutdown(self) -> None:
        """End the threads; a call that runs is waited for."""
        self._short.shutdown()
        self._long.shutdown(cancel_futures=True)
