"""Chats to prompt ids, and generated ids to text: the one way in which all rooms use a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mbd_core.checkpoint.literal_text import MaskedText, Masking, literal, masking_of, token_ids
from mbd_core.checkpoint.tool_turns import plain_turns, takes_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    answered: bool = False,
    masking: Masking | None = None,
) -> MaskedText:
    """A chat in the model's template, up to the beginning of the assistant's answer, with the tools that it may call;
    or, `answered`, to the end of a conversation that has its last answer.

    What messages and tools spell stays text; `masking` is theirs by default. Raises `ValueError` if the tokenizer has
    no template or the template refuses the chat (the order of roles).
    """
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template; send a plain prompt instead")
    turns, shown = [dict(m) for m in messages], [dict(tool) for tool in tools] or None
    masking = masking_of(tokenizer, turns, shown) if masking is None else masking
    turns, shown = masking.masked_json(turns), masking.masked_json(shown)
    if not takes_tools(tokenizer.get_chat_template(tools=shown)):
        turns, shown = plain_turns(turns, shown or ()), None
    try:
        text = tokenizer.apply_chat_template(turns, tools=shown, tokenize=False, add_generation_prompt=not answered)
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    assert isinstance(text, str)
    return MaskedText(text, masking)


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of `chat_text`, whose errors it raises."""
    return chat_prompts(tokenizer, [messages])[0]


def chat_prompts(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
    """`chat_prompt` of several chats, tokenised together."""
    return token_ids(tokenizer, [chat_text(tokenizer, messages) for messages in chats])


def plain_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text without a template, with the special tokens that the tokenizer sets around it."""
    return plain_prompts(tokenizer, [text])[0]


def plain_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """`plain_prompt` of several texts, tokenised together."""
    return token_ids(tokenizer, [literal(tokenizer, text) for text in texts], add_special_tokens=True)


def question_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a user's question: as a chat, or the bare text under a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        return plain_prompt(tokenizer, text)
    return chat_prompt(tokenizer, question(text))


def question(text: str) -> list[dict[str, str]]:
    """A chat with one message of the user."""
    return [{"role": "user", "content": text}]


def decode_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, special: bool = False) -> str:
    """Generated tokens as text, with or without special tokens; spaces are not cleaned up."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
