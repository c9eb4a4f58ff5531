"""A row's `input` and its tokens: a prompt, or texts to score (continuations after contexts).

A chat with functions is in `tool_chats.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from mbd_core.checkpoint.chat import chat_prompts, chat_text, plain_prompts
from mbd_core.checkpoint.literal_text import Masking, evaluated_ids, fixed_masking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_DRAWS = 128
"""Draws of each estimate, as in LLaDA's own evaluation."""
Context = str | list[dict[str, str]]
"""A text, or the messages of a chat, which the model's template renders."""


def prompt_ids(tokenizer: PreTrainedTokenizerBase, inputs: Sequence[str]) -> list[list[int]]:
    """Token ids of prompts that are given as JSON. A chat's messages are rendered by the model's template; a text gets
    the tokenizer's own special tokens before it. Raises `ValueError` for a chat if the tokenizer has no template."""
    contents: list[Any] = [json.loads(text) for text in inputs]
    chats = iter(chat_prompts(tokenizer, [content for content in contents if not isinstance(content, str)]))
    texts = [content for content in contents if isinstance(content, str)]
    plain = iter(plain_prompts(tokenizer, texts))
    return [list(next(plain if isinstance(content, str) else chats)) for content in contents]


@dataclass(frozen=True, kw_only=True)
class ScoredTexts:
    """Continuations to score, each a pair of its context's number and its text.

    draws, seed  draws of each estimate, and their seed
    greedy       also check whether greedy decoding gives the continuation's tokens
    """

    contexts: Sequence[Context]
    pairs: Sequence[tuple[int, str]]
    draws: int = NUM_DRAWS
    seed: int = 0
    greedy: bool = False

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_input(cls, text: str) -> Self | None:
        """The texts to score in a row's `input`; `None` for a prompt, which is a text or a chat."""
        value = json.loads(text)
        return cls(**value) if isinstance(value, dict) else None

    def ids(self, tokenizer: PreTrainedTokenizerBase, *, prefix_id: int) -> list[tuple[list[int], list[int]]]:
        """The ids of every context and its continuation, as lm-evaluation-harness divides them.

        Spaces at the context's end belong to the continuation. Both are encoded together, and the ids after the
        context's ids are the continuation's. An empty context becomes `prefix_id`. Raises `ValueError` for a chat's
        text with a private character of the masking.
        """
        masking = fixed_masking(tokenizer)
        contexts = [_rendered(tokenizer, context, masking) for context in self.contexts]
        divided = []
        for number, continuation in self.pairs:
            in_chat, context = not isinstance(self.contexts[number], str), contexts[number]
            if in_chat:
                continuation = hidden_controls(continuation, masking)
            if not context:
                ids = evaluated_ids(tokenizer, continuation, masking, in_chat=False, add_special_tokens=False)
                divided.append((ids[:1], ids[1:]) if ids[:1] == [prefix_id] else ([prefix_id], ids))
                continue
            begin = context.rstrip()
            whole, before = (
                evaluated_ids(tokenizer, text, masking, in_chat=in_chat) for text in (context + continuation, begin)
            )
            divided.append((before, whole[len(before) :]))
        return divided


def hidden_controls(text: str, masking: Masking) -> str:
    """A chat's text, masked so that its control tokens are read as text. Raises `ValueError` for a private character
    of the masking."""
    if masking.hides_in(text):
        raise ValueError(f"a text of the task has a Unicode non-character from U+FDD0 on: {text[:80]!r}; remove it")
    return masking.masked(text)


def _rendered(tokenizer: PreTrainedTokenizerBase, context: Context, masking: Masking) -> str:
    if isinstance(context, str):
        return context
    turns: list[Mapping[str, Any]] = [
        {**turn, "content": hidden_controls(turn["content"], masking)} for turn in context
    ]
    return chat_text(tokenizer, turns, masking=Masking()).text
