"""A row's conversation, and its form for a chat template, where reasoning has the template's name for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mbd_core.checkpoint.chat import chat_text, question, unknown_variables
from mbd_core.checkpoint.literal_text import MaskedText
from mbd_core.multitf.data.known_names import REASONING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Chat(NamedTuple):
    """A row's name, its conversation, and the functions that it may call, as a chat template shows them.

    `variables` are further variables of the template. `untrained` are the indices of messages that are only context.
    """

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] | None = None
    untrained: Sequence[int] = ()


def is_empty(answer: Mapping[str, Any]) -> bool:
    """Whether an assistant's turn has neither a text nor a call."""
    return not answer["content"].strip() and not answer.get("tool_calls")


def for_template(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> Chat:
    """The chat with its reasoning under the template's name for it.

    Raises `ValueError` if the template shows no reasoning, or lacks a variable of the chat.
    """
    for variable in unknown_variables(tokenizer, chat.variables or ()):
        raise ValueError(
            f"its chat_template_kwargs have {variable!r}, and --model's chat template has no such variable; leave it "
            f"out with --ignore-columns chat_template_kwargs.{variable}"
        )
    name = next((name for message in chat.messages for name in REASONING if name in message), None)
    if name is None:
        return chat
    variables = json.dumps(chat.variables or {}, sort_keys=True)
    shown_name = _reasoning_name(tokenizer, json.dumps(tokenizer.chat_template), variables)
    if shown_name is None:
        raise ValueError(
            f"an answer has {name!r} beside its content, and --model's chat template shows no reasoning; write it "
            f"into the content, or leave it out with --ignore-columns messages.{name}, or the turns' own column"
        )
    messages = [
        {shown_name if key in REASONING else key: value for key, value in message.items()} for message in chat.messages
    ]
    return chat._replace(messages=messages)


@lru_cache(maxsize=16)
def _reasoning_name(tokenizer: PreTrainedTokenizerBase, template: str, variables: str) -> str | None:
    """The name under which this template shows an answer's reasoning, found by rendering an answer."""
    for name in REASONING if template != "null" else ():
        answer = {"role": "assistant", "content": "4", name: "2 and 2"}
        try:
            text = chat_text(tokenizer, [*question("2+2?"), answer], answered=True, variables=json.loads(variables))
        except ValueError:
            continue
        if "2 and 2" in text.text:
            return name
    return None


def prompt_text(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> MaskedText:
    """The template's text of a chat, up to the beginning of its answer."""
    shown = for_template(tokenizer, chat)
    return chat_text(tokenizer, shown.messages, tools=shown.tools, variables=shown.variables or {})
