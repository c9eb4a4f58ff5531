"""What a model is given: a problem in the words of a recipe's setting, after examples, as a chat or as plain text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mbd_core.checkpoint.chat import chat_prompts, plain_prompts, question
from mbd_core.evaluation.tasks import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["turn", "turns", "plain"]


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The text around a problem.

    form     `turn`: one turn of the user, examples included; `turns`: every example is a turn of the user and one of
             the assistant; `plain`: text without a chat template
    text     the problem, with {question} (in words) and, for MBPP, {tests}
    answer   what stands around an example's answer, with {answer}
    joint    between a problem's text and its example's answer, where both are in one text
    between  between examples in one text
    """

    form: Form = "turn"
    text: str = "{question}"
    answer: str = "{answer}"
    joint: str = " "
    between: str = "\n\n"

    @property
    def needs_chat(self) -> bool:
        return self.form != "plain"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A solved problem that stands before the one that is asked."""

    question: str
    answer: str
    tests: str = ""


def worded(wording: Wording, problem: Problem, examples: Sequence[Example] = ()) -> str:
    """The model's input as JSON: the messages of a chat, or one text. `prompt_ids` takes it."""
    shown = [
        (wording.text.format(question=e.question, tests=e.tests), wording.answer.format(answer=e.answer))
        for e in examples
    ]
    asked = wording.text.format(question=problem.text or problem.prompt, tests=problem.tests)
    if wording.form == "turns":
        turns = [turn for pair in shown for turn in zip(("user", "assistant"), pair, strict=True)]
        messages = [{"role": role, "content": content} for role, content in turns]
        return json.dumps([*messages, *question(asked)])
    whole = wording.between.join([*(text + wording.joint + answer for text, answer in shown), asked])
    return json.dumps(whole if wording.form == "plain" else question(whole))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, inputs: Sequence[str]) -> list[list[int]]:
    """Token ids of what `worded` returned: a chat in the model's template, a text with the tokenizer's own special
    tokens before it. Raises `ValueError` for a chat if the tokenizer has no template."""
    given: list[Any] = [json.loads(text) for text in inputs]
    chats = iter(chat_prompts(tokenizer, [one for one in given if not isinstance(one, str)]))
    texts = [one for one in given if isinstance(one, str)]
    plain = iter(plain_prompts(tokenizer, texts))
    return [list(next(plain if isinstance(one, str) else chats)) for one in given]
