"""Thoughts before an answer: their marks, the template's use of them, and a reader that splits them off."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mbd_core.calls.marks import open_length
from mbd_core.calls.rule import ANY, Constants, regex_of
from mbd_core.decoding.grammar.grammar import FORM, Grammar
from mbd_core.decoding.grammar.schemas import ON_A_LINE, GrammarRefused

SLASH = r"\/"  # within a regular expression of Lark
SLASH_OR_ESCAPE = re.compile(r"\\.|/", re.DOTALL)


@dataclass(frozen=True)
class ThoughtForm:
    """The marks around an answer's thoughts. White space beside the marks is part of neither thoughts nor answer."""

    begin: str
    end: str


THOUGHT_FORMS = (
    ThoughtForm("<think>", "</think>"),
    ThoughtForm("<|channel>thought", "<channel|>"),
    ThoughtForm("[THINK]", "[/THINK]"),
    ThoughtForm("<seed:think>", "</seed:think>"),
)
"""Qwen3, DeepSeek R1 and GLM; Gemma 4 and DiffusionGemma; Mistral; Seed-OSS."""


def thought_form(template: str) -> ThoughtForm | None:
    """The thoughts that a chat template opens, shows or removes from earlier answers; `None` if it has none."""
    return next((form for form in THOUGHT_FORMS if form.begin in template or form.end in template), None)


@dataclass(frozen=True)
class Thoughts:
    """The thoughts that an answer may begin with.

    is_open   the prompt ends within thoughts
    has_text  the open thoughts have text in the prompt; otherwise white space at their beginning is dropped
    """

    form: ThoughtForm
    is_open: bool
    has_text: bool = False

    def reader(self) -> ThoughtReader:
        return ThoughtReader(self)

    def before(self, grammar: Grammar, vocabulary: Mapping[str, int]) -> Grammar:
        """The grammar of thoughts that are followed by an answer of `grammar`. Raises `GrammarRefused`.

        If the budget may cut the answer, it may also cut the thoughts.
        """
        constants, schemas = Constants(vocabulary), list(grammar.schemas)
        begin, end = constants(self.form.begin), self.form.end
        answer = f"%lark {{\n{grammar.text}\n}}"
        if grammar.syntax == "json_schema":
            answer = f"%json @{len(schemas)}"
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict):
                raise GrammarRefused(f"{grammar.subject()} {grammar.text[:80]} is no JSON object; give an object")
            schemas.append((FORM, json.dumps({**schema, "x-guidance": ON_A_LINE})))
        elif grammar.syntax == "regex":
            answer = f"/{SLASH_OR_ESCAPE.sub(lambda m: SLASH if m[0] == '/' else m[0], grammar.text)}/"
        token = constants.token(end)
        lines = [
            f"start: {'thoughts' if self.is_open else f'({begin} thoughts)?'} answer",
            *self._cut(begin) * grammar.may_be_cut,
            "thoughts: inside /\\s*/",
            "inside: spelled" if token is None else f"inside: spelled | THOUGHTS {token}",
            f"spelled[lazy]: {ANY} {json.dumps(end)}",
            *([] if token is None else [f"THOUGHTS: {ANY}"]),
            f"answer: {answer}",
        ]
        marks = (end, *grammar.marks)
        return replace(grammar, syntax="lark", text="\n".join(lines), schemas=tuple(schemas), marks=marks)

    def _cut(self, begin: str) -> list[str]:
        """The rest of a grammar's first rule: an answer of thoughts without an end."""
        unended = f"{ANY} & ~/(?s:.*){regex_of(self.form.end)}(?s:.*)/"
        return [f"  | {'' if self.is_open else begin} UNENDED", f"UNENDED: {unended}"]


def thoughts_behind(prompt: str, form: ThoughtForm | None) -> Thoughts | None:
    """The thoughts of the answer to a prompt; `None` if there is no form, or if the prompt has ended the thoughts. The
    prompt's last characters suffice."""
    prompt = prompt.rstrip()
    if form is None or prompt.endswith(form.end):
        return None
    return Thoughts(form, is_open=prompt.endswith(form.begin))


def thoughts_continued(message: str, form: ThoughtForm) -> Thoughts | None:
    """The thoughts of an answer that continues `message`, which has text; `None` if none are open."""
    begun = message.lstrip()
    if not begun.startswith(form.begin) or form.end in begun:
        return None
    return Thoughts(form, is_open=True, has_text=bool(begun.removeprefix(form.begin).strip()))


class ThoughtReader:
    """Splits one answer, whose text is pushed in pieces of any size, into thoughts and the rest.

    in_thought  whether the text so far ends within the thoughts
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._form, self._buffer = thoughts.form, ""
        open_place = "thought" if thoughts.has_text else "begun"
        self._place = open_place if thoughts.is_open else "beginning"  # or "after", "answer"

    @property
    def in_thought(self) -> bool:
        return self._place in ("begun", "thought")

    def push(self, text: str, *, ends: bool) -> tuple[str, str]:
        """The thoughts and the rest that are certain once `text` has come. With `ends`, no text follows."""
        self._buffer += text
        thought = rest = ""
        while (step := self._step(ends)) is not None:
            thought, rest = thought + step[0], rest + step[1]
        return thought, rest

    def _step(self, ends: bool) -> tuple[str, str] | None:
        """A piece of the thoughts and a piece of the rest; `None` if more text is needed."""
        form, text = self._form, self._buffer
        bare = text.lstrip()
        if self._place == "beginning":
            if bare.startswith(form.begin):
                self._place, self._buffer = "begun", bare.removeprefix(form.begin)
            elif ends or not form.begin.startswith(bare):
                self._place = "answer"
            else:
                return None
            return "", ""
        if self._place in ("begun", "after"):
            self._buffer = bare
            if not bare:
                return None
            self._place = "thought" if self._place == "begun" else "answer"
            return "", ""
        if self._place == "thought":
            return self._thought(ends)
        self._buffer = ""
        return ("", text) if text else None

    def _thought(self, ends: bool) -> tuple[str, str] | None:
        inside, mark, rest = self._buffer.partition(self._form.end)
        if mark:
            self._place, self._buffer = "after", rest
            return inside.rstrip(), ""
        kept = 0 if ends else open_length(inside, self._form.end)
        certain = inside[: len(inside) - kept].rstrip()
        self._buffer = "" if ends else inside[len(certain) :]
        return (certain, "") if certain else None
