"""Conversations to samples of tokens: a prompt that is never masked, and a response that ends with EOS."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mbd_core.checkpoint.chat import chat_text
from mbd_core.checkpoint.literal_text import MaskedText, masking_of, token_ids
from mbd_core.models.model_config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# One tokenised sample: a prompt that is never masked and a response that ends with EOS.

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


# Conversations to prompt and response tokens: the template's own text, the boundary between the two checked.


@dataclass(frozen=True)
class EncodedChat:
    """A conversation's tokens up to its last answer, and that answer's, without the EOS that ends and fills it."""

    prompt: list[int]
    response: list[int]


def fill_token(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> int:
    """The EOS that ends and fills answers: the tokenizer's, if the model stops at it, else the model's first."""
    own = tokenizer.eos_token_id
    return own if own in config.eos_token_ids else config.eos_token_ids[0]


def encode_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[tuple[str, Sequence[Mapping[str, str]]]],
    *,
    eos_token_id: int,
) -> list[EncodedChat]:
    """Tokenise named conversations that end with an answer, together.

    The prompt is the template of all messages before the answer, with the beginning of an answer; it must be the
    beginning of the template of the whole conversation, as text and as tokens. Raises `ValueError` naming the
    conversation for which it is not, whose answer is empty, or that the template refuses. Control tokens that a
    message spells are text, in answers too.
    """
    prompts, wholes = [], []
    for name, messages in chats:
        try:
            prompt_text, whole_text = _texts(tokenizer, messages)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        prompts.append(prompt_text)
        wholes.append(whole_text)
    prompt_ids, whole_ids = token_ids(tokenizer, prompts), token_ids(tokenizer, wholes)
    encoded = []
    for (name, _), prompt, whole in zip(chats, prompt_ids, whole_ids, strict=True):
        if whole[: len(prompt)] != prompt:
            raise ValueError(
                f"{name}: the tokens of its prompt are not the beginning of those of the whole conversation: the "
                "answer merges with the prompt's end; change the chat template"
            )
        response = _without_end(tokenizer, whole[len(prompt) :], eos_token_id)
        if not response:
            raise ValueError(f"{name}: its answer is empty")
        encoded.append(EncodedChat(prompt, response))
    return encoded


def _texts(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> tuple[MaskedText, MaskedText]:
    if not messages[-1]["content"].strip():
        raise ValueError("its answer is empty")
    masking = masking_of(tokenizer, messages)
    prompt = chat_text(tokenizer, messages[:-1], masking=masking)
    whole = chat_text(tokenizer, messages, masking=masking, answered=True)
    if not whole.text.startswith(prompt.text):
        raise ValueError(
            "the chat template's prompt is not the beginning of the whole conversation, so where the answer begins is "
            "unknown; change the template, or what it does to earlier turns"
        )
    return prompt, whole


def _without_end(tokenizer: PreTrainedTokenizerBase, response: list[int], eos_token_id: int) -> list[int]:
    """The response without the EOS that the template ends it with, and white space after that; it is filled again."""
    if eos_token_id not in response:
        return response
    last = len(response) - 1 - response[::-1].index(eos_token_id)
    return response if tokenizer.decode(response[last + 1 :]).strip() else response[:last]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the vocabulary and the chat template: whether two model folders encode conversations alike."""
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    return hashlib.sha256(content.encode()).hexdigest()


# An error in one sentence, for what other libraries raise.


def error_sentence(error: BaseException) -> str:
    """What an error says; the lines after it are advice or a traceback. An `OSError` says enough without its type."""
    line = str(error).strip().partition("\n")[0]
    return line if line and isinstance(error, OSError) else f"{type(error).__name__}: {line}".rstrip(": ")
