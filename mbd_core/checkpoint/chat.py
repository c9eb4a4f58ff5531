"""Turns chats into prompt ids, and generated ids into text: all rooms use a tokenizer and its template through this
file.

Calls of functions have a form (`mbd_core/calls`), which is recognised from the template. A template without tools gets
the tools, and the form, in a system turn; calls are shown by the template itself if it shows any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mbd_core.calls.form import CallForm
from mbd_core.calls.forms import FORM_NAMES, HERMES, form_named
from mbd_core.calls.recognition import SHAPE_ERRORS, history, recognised, turn_text
from mbd_core.calls.thoughts import Thoughts, thought_form, thoughts_behind
from mbd_core.checkpoint.literal_text import MaskedText, Masking, literal, masking_of, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


INSTRUCTION = (
    "You may call functions. Each line between <tools> and </tools> describes one:\n<tools>\n{tools}\n</tools>\n"
    "To call functions, {how}:\n{example}"
)
AFTER_TEXT, ALONE = "end your answer with one block like this for each call", "answer with nothing but calls like this"


def takes_tools(template: str) -> bool:
    """Whether a chat template shows tools itself: it names them."""
    return re.search(r"\btools\b", template) is not None


def call_form(tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> CallForm:
    """The form of a model's calls: the form with this name, or the form of its chat template.

    Raises `ValueError` for a template that takes tools and shows calls in a form that is not known.
    """
    form = _template_form(tokenizer, json.dumps(tokenizer.chat_template))
    if name is not None:
        return form if form is not None and form.name == name else form_named(name)
    if form is None:
        raise ValueError(
            "the model's chat template shows tool calls in a form of its own, so calls could not be told from text; "
            f"the forms that are known are {', '.join(FORM_NAMES)}: give the model's form as call_form"
        )
    return form


@lru_cache(maxsize=16)
def _template_form(tokenizer: PreTrainedTokenizerBase, template: str) -> CallForm | None:
    """The form in which this chat template shows calls; a template with neither tools nor calls gets a form.

    Some templates show calls, but no tools: DeepSeek's.
    """
    if template == "null":
        return HERMES
    form = _shown_form(tokenizer, template)
    return form if form is not None or takes_tools(tokenizer.get_chat_template(tools=[{}])) else HERMES


@lru_cache(maxsize=16)
def _shown_form(tokenizer: PreTrainedTokenizerBase, template: str) -> CallForm | None:
    """The form in which this chat template shows calls, if it is known."""
    return recognised(partial(rendered, tokenizer))


def rendered(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]], *, tools: Any = None, **fields: Any
) -> str:
    """Turns in the model's template. Raises any error of the template.

    `apply_chat_template` drops members that are None. Some templates show calls only beside a content of None.
    """
    if all(turn.get("content", "") is not None for turn in turns):
        return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, **fields))
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=tools)
    variables = {**tokenizer.special_tokens_map, **fields}
    [text], _ = render_jinja_template([turns], tools=tools, chat_template=template, **variables)
    return str(text)


def plain_turns(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """A chat with calls as turns of text only: calls end the assistant's turn, and a result is a turn of the user."""
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
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            calls = turn_text(form, message.get("tool_calls") or ())
            turns.append({**kept, "content": form.gap.join(filter(None, [text, calls]))})
        after_result = role == "tool"
    return turns


def with_tools(
    turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], form: CallForm
) -> list[dict[str, Any]]:
    """The turns, with the tools and the form of their calls at the end of the system turn."""
    if not tools:
        return turns
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    how = AFTER_TEXT if form.text_before else ALONE
    shown = INSTRUCTION.format(tools=lines, how=how, example=form.example)
    if turns[:1] and turns[0]["role"] == "system":
        system = "\n\n".join(filter(None, [turns[0]["content"], shown]))
        return [{**turns[0], "content": system}, *turns[1:]]
    return [{"role": "system", "content": shown}, *turns]


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    answered: bool = False,
    continues: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
    masking: Masking | None = None,
    form_name: str | None = None,
) -> MaskedText:
    """A chat in the model's template, with the tools that the assistant may call.

    The text ends at the beginning of the assistant's answer. With `answered`, the last message is an answer, and the
    text ends after it. With `continues`, the text ends with the last message's text. `variables` are further variables
    of the template. `form_name` overrides the template's form of calls.

    Control tokens that messages, tools and variables spell stay text. `masking` masks them; by default it is made here
    from these texts. Raises `ValueError` if the tokenizer has no template, or if the template refuses the chat (the
    order of roles) or fails on it. Raises `VariableRefused` for a variable that cannot be set or that the template
    cannot use.
    """
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template; send a plain prompt instead")
    turns, shown = [dict(m) for m in messages], [dict(tool) for tool in tools] or None
    for name in variables:
        if name in {*RESERVED, *tokenizer.special_tokens_map} or not name.isidentifier():
            raise VariableRefused(f"'{name}' is no variable that a client may set; leave it out")
    masking = masking_of(tokenizer, turns, shown, dict(variables)) if masking is None else masking
    own_names = {_own_name(tokenizer, name): value for name, value in variables.items()} | dict(variables)
    turns, shown, given = masking.masked_json(turns), masking.masked_json(shown), masking.masked_json(own_names)
    has_calls = any(turn.get("tool_calls") for turn in turns)
    shows = _shown_form(tokenizer, json.dumps(tokenizer.chat_template)) if shown or has_calls else None
    if not takes_tools(tokenizer.get_chat_template(tools=shown)):
        form = call_form(tokenizer, form_name) if shown or has_calls else HERMES
        own = history(form, turns) if form == shows else plain_turns(turns, form)
        turns, shown = with_tools(own, shown or (), form), None
    elif shows is not None and has_calls:
        turns = history(shows, turns)
    if continues:
        turns[-1]["content"] += TEXT_END
    begins = not answered and not continues
    try:
        text = rendered(tokenizer, turns, tools=shown, add_generation_prompt=begins, **given)
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    except SHAPE_ERRORS as error:
        if not variables:  # Hermes' template follows a schema without a type for ever
            raise ValueError(f"the model's chat template cannot show these messages and tools: {error}") from error
        raise VariableRefused(f"the model's chat template cannot use these values: {error}") from error
    if continues:
        text, found, _ = text.rpartition(TEXT_END)
        if not found:
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
    """The variables that the model's chat template does not mention, under another name neither."""
    return [name for name in names if not _mentions(tokenizer, _own_name(tokenizer, name))]


OTHER_NAMES = {"enable_thinking": "thinking"}
"""A variable's name in most templates, and in others (DeepSeek V3.1)."""


def _own_name(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """The template's own name of a variable."""
    other = OTHER_NAMES.get(name)
    return other if other and _mentions(tokenizer, other) and not _mentions(tokenizer, name) else name


def _mentions(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


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


PROMPT_END = 16  # tokens of a prompt's end, which say whether thoughts are open there


def prompt_thoughts(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> Thoughts | None:
    """The thoughts that an answer to a chat's prompt may begin with; `None` if its template knows none."""
    form = thought_form(tokenizer.get_chat_template() if tokenizer.chat_template else "")
    return thoughts_behind(decode_text(tokenizer, prompt[-PROMPT_END:], special=True), form)


def decode_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, special: bool = False) -> str:
    """Generated tokens as text, with or without special tokens; spaces are not cleaned up."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
