"""Chats to prompt ids, and generated ids to text: all rooms use a tokenizer and its template through this file.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

Chat templates of Qwen's kind teach a model this form of a call. A template without tools gets the same form in a
system turn. A template with tools in another form is refused, because its calls could not be told from text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mbd_core.checkpoint.literal_text import MaskedText, Masking, literal, masking_of, token_ids
from mbd_core.decoding.grammar.grammar import FORM, Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BEGIN, END = "<tool_call>", "</tool_call>"
HEAD, ARGUMENTS, TAIL = '\n{"name": "', '", "arguments": ', "}\n"
INSTRUCTION = (
    "You may call functions. Each line between <tools> and </tools> describes one:\n<tools>\n{tools}\n</tools>\n"
    "To call functions, end your answer with one block like this for each call:\n"
    '<tool_call>\n{{"name": "the function", "arguments": {{...}}}}\n</tool_call>'
)
COMPACT = {"whitespace_flexible": False}  # as in answers of a form alone
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as in templates


def takes_tools(template: str) -> bool:
    """Whether a chat template shows tools itself: it names them."""
    return re.search(r"\btools\b", template) is not None


def check_form(template: str) -> None:
    """Raises `ValueError` for a template that takes tools and has calls in another form."""
    if takes_tools(template) and BEGIN not in template:
        raise ValueError(
            f"the model's chat template has tool calls in a form of its own, without {BEGIN}; calls could not be "
            "told from text"
        )


def plain_turns(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chat with tools as turns of text alone.

    The tools end the system turn. Calls end the assistant's turn. A function's result is a turn of the user.
    """
    turns: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            response = f"<tool_response>\n{text}\n</tool_response>"
            if after_result:
                turns[-1]["content"] += "\n" + response
            else:
                turns.append({"role": "user", "content": response})
        else:
            calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            turns.append({**kept, "content": "\n".join(filter(None, [text, *calls]))})
        after_result = role == "tool"
    if tools:
        shown = INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if turns[:1] and turns[0]["role"] == "system":
            turns[0]["content"] = "\n\n".join(filter(None, [turns[0]["content"], shown]))
        else:
            turns.insert(0, {"role": "system", "content": shown})
    return turns


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f"{BEGIN}{HEAD}{function['name']}{ARGUMENTS}{arguments}{TAIL}{END}"


@dataclass(frozen=True, kw_only=True)
class CallRule:
    """The calls that an answer may have.

    functions  names of functions, and the JSON schemas of their arguments
    must       the answer is a call; otherwise it is text, which calls may follow
    several    several calls may follow one another
    form       the JSON schema of an answer without a call
    """

    functions: tuple[tuple[str, Mapping[str, Any]], ...]
    must: bool
    several: bool
    form: Mapping[str, Any] | None = None

    def grammar(self, vocabulary: Mapping[str, int]) -> Grammar:
        """The grammar of such answers; `vocabulary` says which marks are tokens of their own. Raises `GrammarRefused`.

        Text ends where a call begins, however its mark is written. The budget may cut a text, but not a call. Text of
        a form has no call behind it and is not cut either.
        """
        begin, end = (mark if mark in vocabulary else json.dumps(mark) for mark in (BEGIN, END))
        lines = [
            f"call: {begin} body",
            f"body: {json.dumps(HEAD)} function {json.dumps(TAIL)} {end}",
            "function: " + " | ".join(f"f{i}" for i in range(len(self.functions))),
        ]
        lines += [f"f{i}: {json.dumps(name + ARGUMENTS)} %json @{i}" for i, (name, _) in enumerate(self.functions)]
        others = ' ("\\n" call)*' if self.several else ""
        schemas = [(name, {**schema, "x-guidance": SEPARATORS}) for name, schema in self.functions]
        if self.must:
            lines.insert(0, f"start: call{others}")
        elif self.form is not None:
            lines[:0] = [f"start: form | call{others}", f"form: %json @{len(schemas)}"]
            schemas.append((FORM, {**self.form, "x-guidance": COMPACT}))
        else:
            head = "spelled" if begin != BEGIN else f"spelled | TEXT {begin}"
            lines[:0] = [
                f"start: TEXT | head body{others}",
                f"head: {head}",
                f"spelled[lazy]: /(?s:.*)/ {json.dumps(BEGIN)}",
                "TEXT: /(?s:.*)/",
            ]
        return Grammar(
            syntax="lark",
            text="\n".join(lines),
            may_be_cut=not self.must and self.form is None,
            schemas=tuple((name, json.dumps(schema)) for name, schema in schemas),
        )


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    answered: bool = False,
    continues: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
    masking: Masking | None = None,
) -> MaskedText:
    """A chat in the model's template, with the tools that the assistant may call.

    The text ends at the beginning of the assistant's answer. With `answered`, it is a conversation with its last
    answer, up to the end. With `continues`, it ends with the last message's text. `variables` are further variables of
    the template.

    Text that messages, tools and variables spell stays text; `masking` is theirs by default. Raises `ValueError` if
    the tokenizer has no template or the template refuses the chat (the order of roles). Raises `VariableRefused` for a
    variable that cannot be set or that the template cannot use.
    """
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template; send a plain prompt instead")
    turns, shown = [dict(m) for m in messages], [dict(tool) for tool in tools] or None
    for name in variables:
        if name in {*RESERVED, *tokenizer.special_tokens_map} or not name.isidentifier():
            raise VariableRefused(f"'{name}' is no variable that a client may set; leave it out")
    masking = masking_of(tokenizer, turns, shown, dict(variables)) if masking is None else masking
    turns, shown, given = masking.masked_json(turns), masking.masked_json(shown), masking.masked_json(dict(variables))
    if not takes_tools(tokenizer.get_chat_template(tools=shown)):
        turns, shown = plain_turns(turns, shown or ()), None
    if continues:
        turns[-1]["content"] += TEXT_END
    begins = not answered and not continues
    try:
        text = tokenizer.apply_chat_template(turns, tools=shown, tokenize=False, add_generation_prompt=begins, **given)
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if not variables:
            raise
        raise VariableRefused(f"the model's chat template cannot use these values: {error}") from error
    assert isinstance(text, str)
    if continues:
        text, shows, _ = text.rpartition(TEXT_END)
        if not shows:
            raise ValueError("the model's chat template does not show the last message, which is to be continued")
    return MaskedText(text, masking)


RESERVED = frozenset(
    (
        "messages",
        "conversation",
        "self",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "kwargs",
        "sanitize_control_tokens",
    )
)
"""Names that a template's renderer takes beside variables, and a request's own fields."""
TEXT_END = "\U0010ffff"  # the last of Unicode's non-characters, which no text has


class VariableRefused(ValueError):
    """A variable of a chat template that cannot be set or used."""


def unknown_variables(tokenizer: PreTrainedTokenizerBase, names: Iterable[str]) -> list[str]:
    """The variables that the model's chat template does not mention."""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    return [name for name in names if re.search(rf"\b{re.escape(name)}\b", template) is None]


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of `chat_text`; raises its errors."""
    return chat_prompts(tokenizer, [messages])[0]


def chat_prompts(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
    """`chat_prompt` of several chats, tokenised together."""
    return token_ids(tokenizer, [chat_text(tokenizer, messages) for messages in chats])


def plain_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text without a template, with the tokenizer's own special tokens around it."""
    return plain_prompts(tokenizer, [text])[0]


def plain_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """`plain_prompt` of several texts, tokenised together."""
    return token_ids(tokenizer, [literal(tokenizer, text) for text in texts], add_special_tokens=True)


def question_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a user's question: as a chat, or as bare text if the tokenizer has no chat template."""
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
