"""Chats to token ids in a model's template. Answers that come with `token_ids` keep these ids."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mbd_core.calls.thoughts import Thoughts, thought_form
from mbd_core.checkpoint.chat import VariableRefused, chat_text, decode_text, unknown_variables
from mbd_core.checkpoint.literal_text import MaskedText, control_tokens
from mbd_core.serving.api.chat_fields import TemplateFields
from mbd_core.serving.api.errors import FieldError
from mbd_core.serving.api.tokenizing import text_ids
from mbd_core.serving.tokens.served_model import ServedModel

ANSWER_PLACE = "\U0010fffe"  # a non-character, which no text has


def chat_ids(
    model: ServedModel,
    turns: Sequence[Mapping[str, Any]],
    ending: TemplateFields,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    special: bool = False,
) -> list[int]:
    """The ids of a chat in the model's template. Raises the errors of `text_ids`, and the template's refusals.

    A turn's `token_ids` replace the ids of its content, unless the `token_ids` also have thoughts, or the template
    changes the content's text.
    """
    plain_turns = [{name: value for name, value in turn.items() if name != "token_ids"} for turn in turns]
    answers = {number: turn["token_ids"] for number, turn in enumerate(turns) if "token_ids" in turn}
    if answers and special:
        why = "are not taken where the tokenizer's special tokens stand around a chat"
        raise FieldError(f"messages.{min(answers)}.token_ids", why, remedy="leave add_special_tokens out")
    answers = {
        number: answer
        for number, answer in answers.items()
        if _spells(model, answer, str(plain_turns[number]["content"]), field=f"messages.{number}.token_ids")
    }
    try:
        render = partial(
            chat_text,
            model.tokenizer,
            tools=tools,
            answered=ending.add_generation_prompt is False,
            continues=bool(ending.continue_final_message),
            variables=ending.variables(partial(unknown_variables, model.tokenizer)),
            form_name=model.call_form,
        )
        text = render(plain_turns)
        pieces = _around_answers(render, plain_turns, sorted(answers), text) if answers else None
    except VariableRefused as error:
        raise FieldError("chat_template_kwargs", str(error)) from None
    except ValueError as error:
        raise FieldError("messages", str(error)) from None
    try:
        if pieces is None:
            return text_ids(model, text, field="messages", special=special)
        ids = text_ids(model, pieces[0], field="messages", special=False)
        for number, piece in zip(sorted(answers), pieces[1:], strict=True):
            ids += answers[number]
            ids += text_ids(model, piece, field="messages", special=False) if piece.text else []
    except FieldError as error:
        why = error.message.removeprefix("messages: ") + share_of_tools(tools)
        raise FieldError("messages", why, code=error.code or "") from None
    return ids


def share_of_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The end of an error message on a chat that is too long: the length of its tools."""
    if not tools:
        return ""
    length = len(json.dumps(tools, ensure_ascii=False))
    return f"; the {len(tools)} tools have {length} characters, so give fewer, or shorter descriptions"


def _spells(model: ServedModel, answer: Sequence[int], content: str, *, field: str) -> bool:
    """Whether the tokens `answer` spell exactly this content; `False` if they have thoughts before the content.

    Raises `FieldError` if the tokens are not an answer with this content.
    """
    tokenizer = model.tokenizer
    unknown = next((t for t in answer if t >= len(tokenizer)), None)
    if unknown is not None:
        raise FieldError(field, f"is no token; the vocabulary has {len(tokenizer)}", value=unknown)
    controls, used = control_tokens(tokenizer), {*tokenizer.convert_ids_to_tokens(list(answer))}
    if not used & controls and decode_text(tokenizer, answer) == content:
        return True
    form = thought_form(tokenizer.get_chat_template() if tokenizer.chat_template else "")
    marks = () if form is None else (form.begin, form.end)
    if form is not None and all(any(mark.startswith(control) for mark in marks) for control in used & controls):
        text = decode_text(tokenizer, answer, special=True)
        if any(Thoughts(form, is_open=o).reader().push(text, ends=True)[1] == content for o in (False, True)):
            return False
    why = "are not the tokens of the content beside them, as an answer's token_ids are"
    raise FieldError(field, why, remedy="send both as they came, or leave token_ids out")


def _around_answers(
    render: Callable[..., MaskedText],
    turns: Sequence[Mapping[str, Any]],
    answered: Sequence[int],
    text: MaskedText,
) -> list[MaskedText] | None:
    """The texts before, between and after the answers of the turns `answered`.

    `None` if the template does not show each answer once, whole (except for surrounding whitespace) and in order.

    Whitespace that the template renders before a finished answer but not in the generation prompt is removed; the
    model never saw it.
    """
    if ANSWER_PLACE in text.text:
        return None
    marked = [dict(turn) for turn in turns]
    for number in answered:
        marked[number]["content"] = ANSWER_PLACE
    pieces = render(marked)
    parts = pieces.plain.split(ANSWER_PLACE)
    if len(parts) != len(answered) + 1:
        return None
    for shown in (str, str.strip):
        answers = [shown(str(turns[number]["content"])) for number in answered]
        if "".join(a + b for a, b in zip(parts, [*answers, ""], strict=True)) == text.plain:
            blanks = _blanks_before_answers(render)
            shown_parts = pieces.text.split(ANSWER_PLACE)
            before = [part.removesuffix(blanks) for part in shown_parts[:-1]]
            return [MaskedText(part, pieces.masking) for part in (*before, shown_parts[-1])]
    return None


def _blanks_before_answers(render: Callable[..., MaskedText]) -> str:
    """The whitespace that the template renders before a finished answer but not at the end of a generation prompt."""
    question = {"role": "user", "content": "x"}
    try:
        begin = render([question], answered=False, continues=False).text
        shown = render([question, {"role": "assistant", "content": ANSWER_PLACE}], answered=True, continues=False).text
    except ValueError:  # the template refuses these turns
        return ""
    between = shown.partition(ANSWER_PLACE)[0].removeprefix(begin)
    return between if between.isspace() else ""
