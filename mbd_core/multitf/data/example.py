"""A tokenised sample: a prompt that is never masked and a response that ends with EOS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

IGNORE = -100
KEPT_FILL = 32
"""The number of labelled EOS in the fill of a sample's end, as DMax trains them."""


@dataclass(frozen=True)
class Example:
    """A sample's tokens, its response padded with EOS to a whole block; `prompt_length` tokens are never masked.

    `earlier`: earlier trained answers of the same conversation, each encoded as its own sample. Their tokens before
    the EOS are a prefix of `tokens`. Raises `ValueError` for a sample without a response.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    earlier: tuple[Example, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_length < len(self.tokens):
            raise ValueError(
                f"a sample of {len(self.tokens)} tokens whose prompt has {self.prompt_length} holds no response; "
                "give one with a response"
            )


def filled_length(length: Any, block_size: int) -> Any:
    """The length of a sample that fills its blocks, for one length or an array of lengths."""
    return -(-length // block_size) * block_size


def encode_example(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    eos_token_id: int,
    block_size: int,
    max_length: int,
    trailing_fill: int = 0,
) -> Example | None:
    """Prompt + response + EOS, filled with EOS to a block boundary; `None` if that exceeds `max_length` tokens.

    `trailing_fill` adds up to that number of EOS more, as far as `max_length` has room.
    """
    tokens = [*prompt, *response, eos_token_id]
    if filled_length(len(tokens), block_size) > max_length:
        return None
    tokens += [eos_token_id] * min(trailing_fill, max_length // block_size * block_size - len(tokens))
    tokens += [eos_token_id] * (-len(tokens) % block_size)
    return Example(tuple(tokens), len(prompt))


def answer_labels(tokens: Sequence[int], prompt_length: int, *, kept_fill: int = KEPT_FILL) -> list[int]:
    """A label at every response position, masked or not (DMax), except past `kept_fill` of the EOS at the end.

    The fill is the run of the last token at the end. Other positions have `IGNORE`.
    """
    end = len(tokens)
    while end > prompt_length and tokens[end - 1] == tokens[-1]:
        end -= 1
    stop = min(len(tokens), end + kept_fill)
    return [t if prompt_length <= i < stop else IGNORE for i, t in enumerate(tokens)]
