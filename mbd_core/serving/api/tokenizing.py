"""Texts to token ids at a bounded cost, off the event loop.

Tokenising takes about a second per few hundred thousand characters. So a text that is too long is refused after its
first part, and long texts have their own thread, so that no short text waits for them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mbd_core.checkpoint.literal_text import MaskedText, literal, token_ids
from mbd_core.serving.api.errors import FieldError
from mbd_core.serving.tokens.served_model import ServedModel
from mbd_core.serving.tokens.stream import TooManyRequests

LONG = 20_000  # a request with more characters is long
MOST_LONG = 16  # long requests that may wait for their thread
PART = 8  # characters of the first part, per token of the limit; if the part fits, the next part is tried
GROWTH = 4  # each part is this many times as long as the last
MARGIN = 256  # tokens by which a part may exceed the limit, because it may end within a word

EncodeText = Callable[[str], list[int]]
T = TypeVar("T")


class TextTooLong(ValueError):
    """A text has too many tokens."""


def bounded_ids(encode: EncodeText, text: str, *, limit: int) -> list[int]:
    """The ids of `text`. Raises `TextTooLong` as soon as a part of it has more than about `limit` tokens."""
    end = PART * limit + MARGIN
    while end < len(text):
        if len(encode(text[:end])) > limit + MARGIN:
            raise TextTooLong(f"{len(text)} characters are more than {limit} tokens, which is the limit in all")
        end *= GROWTH
    return encode(text)


def text_ids(
    model: ServedModel, text: str | MaskedText, *, field: str, special: bool, parse_special: bool = False
) -> list[int]:
    """The ids of the text in `field`. `special` adds the tokenizer's special tokens around it.

    A control token's name in a client's text is plain text, unless `parse_special`; a chat's text is masked already.
    Raises `FieldError` for a text with far too many tokens. The engine refuses a text with slightly too many.
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
        raise FieldError(field, str(error), code="context_length_exceeded") from None


class TokenizerThreads:
    """Two threads that tokenise: one for short texts, one for long texts.

    After its first call, which sets it up, a fast tokenizer may be used in both threads at once.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-long")
        self._num_long = 0

    async def run(self, call: Callable[[], T], *, characters: int) -> T:
        """The result of `call`, which tokenises `characters` characters. Raises `TooManyRequests` if many long texts
        wait."""
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
        """End the threads, after the running calls."""
        self._short.shutdown()
        self._long.shutdown(cancel_futures=True)
