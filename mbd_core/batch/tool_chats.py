"""A row's `input` that is a chat with functions, and its answer: text and calls, read by the model's own form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from mbd_core.calls.answer_reader import AnswerReader
from mbd_core.calls.reader import CallReader
from mbd_core.calls.rule import CallRule
from mbd_core.checkpoint.chat import call_form, chat_text, decode_text, prompt_thoughts
from mbd_core.checkpoint.literal_text import token_ids
from mbd_core.decoding.grammar.grammar import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ToolChat:
    """A chat whose answer may call functions.

    tools    the functions, as in OpenAI's requests
    grammar  whether a grammar holds calls to their form, and arguments to their JSON schemas
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    grammar: bool = True

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_input(cls, text: str) -> Self | None:
        """The chat in a row's `input`; `None` for another input."""
        value = json.loads(text)
        return cls(**value) if isinstance(value, dict) and "tools" in value else None

    def prompt(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The prompt's ids. Raises `ValueError` if the model has no template, or its template refuses the chat."""
        return token_ids(tokenizer, [chat_text(tokenizer, self.messages, tools=self.tools)])[0]

    def answer_grammar(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> Grammar | None:
        """The grammar of the answer to the prompt, thoughts before it included; `None` if it is decoded freely.

        Raises `GrammarRefused`. Raises `ValueError`, also for a free answer, if the template shows calls in an unknown
        form, because such calls could not be read.
        """
        form = call_form(tokenizer)
        if not self.grammar:
            return None
        vocabulary, thoughts = tokenizer.get_added_vocab(), prompt_thoughts(tokenizer, prompt)
        grammar = self._rule.grammar(form, vocabulary)
        return grammar if thoughts is None else thoughts.before(grammar, vocabulary)

    def answer(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """The answer of these tokens, as `answer_text` writes it."""
        thoughts = prompt_thoughts(tokenizer, prompt)
        calls = CallReader(call_form(tokenizer), dict(self._rule.functions))
        reader = AnswerReader(None if thoughts is None else thoughts.reader(), calls)
        piece = reader.push(decode_text(tokenizer, tokens, special=True), ends=True)
        return answer_text(piece.content, [call["function"] for call in piece.calls])

    @property
    def _rule(self) -> CallRule:
        functions = [tool["function"] for tool in self.tools]
        return CallRule(
            functions=tuple((function["name"], function["parameters"]) for function in functions),
            must=False,
            several=True,
        )


def answer_text(content: str, calls: Sequence[Mapping[str, str]]) -> str:
    """An answer with calls as JSON. `arguments` stay text, as the model wrote them."""
    named = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return json.dumps({"content": content, "calls": named}, ensure_ascii=False)
