"""Prompts are tokenised at a bounded cost, and long ones hold up nobody else."""

import asyncio
import threading

import pytest

from mbd_core.serving.api import tokenizing
from mbd_core.serving.api.tokenizing import GROWTH, LONG, MARGIN, PART, TextTooLong, TokenizerThreads, bounded_ids
from mbd_core.serving.tokens.stream import TooManyRequests

LIMIT = 300  # seconds for what ends by itself, however busy the machine is


class Words:
    """A tokenizer whose tokens are words, which counts the characters that it reads."""

    read = 0

    def encode(self, text: str) -> list[int]:
        self.read += len(text)
        return [len(word) for word in text.split()]


@pytest.mark.parametrize("length", [0, 1, 100, 5_000, 100_000])
def test_a_text_that_fits_is_read_whole(length: int) -> None:
    words, text = Words(), "x" * length + " y"
    assert bounded_ids(words.encode, text, limit=40) == Words().encode(text)
    assert words.read <= 2 * len(text)


def test_a_text_that_cannot_fit_is_refused_after_a_part_of_it() -> None:
    words = Words()
    with pytest.raises(TextTooLong):
        bounded_ids(words.encode, "a " * 2_500_000, limit=1000)
    assert words.read <= PART * 1000 + MARGIN
    with pytest.raises(TextTooLong):  # it begins with a few long words
        bounded_ids(words.encode, "x" * 10_000 + " a" * 2_500_000, limit=1000)
    assert words.read <= 3 * GROWTH * (PART * 1000 + MARGIN)


def test_a_text_a_little_too_long_is_the_engine_s_to_refuse() -> None:
    """It knows both numbers."""
    assert len(bounded_ids(Words().encode, "a " * 1100, limit=1000)) == 1100


def test_short_texts_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "MOST_LONG", 2)
    go_on = threading.Event()

    async def scenario() -> None:
        threads = TokenizerThreads()
        try:
            async with asyncio.timeout(LIMIT):
                long = [asyncio.create_task(threads.run(go_on.wait, characters=LONG + 1)) for _ in range(2)]
                await asyncio.sleep(0)
                assert await threads.run(lambda: "short", characters=LONG) == "short"
                with pytest.raises(TooManyRequests):
                    await threads.run(lambda: "one more", characters=LONG + 1)
                assert not any(one.done() for one in long)
                go_on.set()
                assert await asyncio.gather(*long) == [True, True]
                assert await threads.run(lambda: "there is room", characters=LONG + 1) == "there is room"
        finally:
            go_on.set()
            threads.shutdown()

    asyncio.run(scenario())
