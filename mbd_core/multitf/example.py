"""One tokenised sample: a prompt that is never masked and a response that ends with EOS."""

from collections.abc import Sequence
from dataclasses import dataclass

IGNORE = -100
KEPT_FILL = 32
"""Of the EOS that fill a sample's end so many are labelled, as DMax trains them."""


@dataclass(frozen=True)
class Example:
    """A sample's tokens, its response padded with EOS to a whole block; `prompt_length` tokens are never masked.

    Raises `ValueError` for a sample without a response.
    """

    tokens: tuple[int, ...]
    prompt_length: int

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_length < len(self.tokens):
            raise ValueError(
                f"a sample of {len(self.tokens)} tokens whose prompt has {self.prompt_length} holds no response; "
                "give one with a response"
            )


def filled_length(length: int, block_size: int) -> int:
    """A sample's tokens once they fill their blocks."""
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

    `trailing_fill` adds up to that many EOS more, as far as `max_length` has room.
    """
    tokens = [*prompt, *response, eos_token_id]
    if filled_length(len(tokens), block_size) > max_length:
        return None
    tokens += [eos_token_id] * min(trailing_fill, max_length // block_size * block_size - len(tokens))
    tokens += [eos_token_id] * (-len(tokens) % block_size)
    return Example(tuple(tokens), len(prompt))


def answer_labels(tokens: Sequence[int], prompt_length: int, *, kept_fill: int = KEPT_FILL) -> list[int]:
    """A label at every response position, masked or not (DMax), except past `kept_fill` of the EOS at the end.

    The fill is the run of the last token at the end; `IGNORE` elsewhere.
    """
    end = len(tokens)
    while end > prompt_length and tokens[end - 1] == tokens[-1]:
        end -= 1
    stop = min(len(tokens), end + kept_fill)
    return [t if prompt_length <= i < stop else IGNORE for i, t in enumerate(tokens)]
