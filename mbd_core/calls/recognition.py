"""The form of calls of a chat template, found by rendering probe calls, never by a model's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from mbd_core.calls.form import ID_LENGTH, CallForm
from mbd_core.calls.forms import FORMS

Render = Callable[..., str]
"""Renders turns, with `tools` and `add_generation_prompt` by name. Raises any error of the template."""

SHAPE_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The errors that a chat template raises, beside its own `TemplateError`, for values of a wrong shape."""

SAID = "Let me look"
PROBES = (("probe_first", {"city": "Rome", "days": [2, 3]}), ("probe_second", {"city": "Oslo", "days": [4]}))
IDS = ("abcdefgh1", "abcdefgh2")
DAYS = {"type": "array", "items": {"type": "integer"}, "description": "days"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "city"}, "days": DAYS},
                "required": ["city", "days"],
            },
        },
    }
    for name, _ in PROBES
]


def recognised(render: Render) -> CallForm | None:
    """The form in which a template shows calls, with the template's white space and types of fields. `None` if it is
    no known form."""
    for number in (2, 1):
        for json_text, null_text in ((False, False), (True, False), (False, True), (True, True)):
            text = _shown(render, number, json_text=json_text, null_text=null_text)
            for form in FORMS if text else ():
                found = _found(text, form, number)
                if found is not None and (found.mark or text.startswith(_prompt(render) + found.opening)):
                    return _with_text(render, replace(found, json_text=json_text, null_text=null_text))
    return None


def _shown(render: Render, number: int, *, content: str = "", json_text: bool = False, null_text: bool = False) -> str:
    """A chat with this number of probe calls, or an empty text if the template refuses it."""
    answer: dict[str, Any] = {"role": "assistant", "content": None if null_text and not content else content}
    answer["tool_calls"] = list(_turns_calls(number, json_text=json_text))
    try:
        return render([{"role": "user", "content": "?"}, answer], tools=TOOLS, add_generation_prompt=False)
    except (TemplateError, *SHAPE_ERRORS):
        return ""


def _prompt(render: Render) -> str:
    """The chat before the probe calls, up to the beginning of the answer."""
    return render([{"role": "user", "content": "?"}], tools=TOOLS, add_generation_prompt=True)


def _turns_calls(number: int, *, json_text: bool) -> Iterator[dict[str, Any]]:
    for call_id, (name, arguments) in list(zip(IDS, PROBES, strict=True))[:number]:
        given: Any = json.dumps(arguments) if json_text else arguments
        yield {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def _found(text: str, form: CallForm, number: int) -> CallForm | None:
    """The form, with the white space that this rendering has around calls; `None` if the form does not fit."""
    written = [form.call(name, args, call_id=call_id) for call_id, (name, args) in zip(IDS, PROBES, strict=True)]
    _, shows, rest = text.partition(form.begin + written[0])
    if shows and number == 2:
        between, shows, rest = rest.partition(written[1])
        if between.strip() != form.between.strip():
            return None
        form = replace(form, between=between or form.between)
    before_end = rest[: len(rest) - len(rest.lstrip())] if form.end else ""
    if not shows or not rest.startswith(before_end + form.end):
        return None
    return replace(form, end=before_end + form.end, several=form.several and number == 2)


def _with_text(render: Render, form: CallForm) -> CallForm:
    """The form, with the template's treatment of text before calls."""
    number = 2 if form.several else 1
    text = _shown(render, number, content=SAID, json_text=form.json_text, null_text=form.null_text)
    _, shows, after = text.rpartition(SAID)
    if not shows or form.opening + PROBES[0][0] not in text or not form.text_before:
        return replace(form, text_before=False)
    gap = after.partition(form.mark)[0]
    return replace(form, gap=gap) if form.mark in after and gap.isspace() else form


def history(form: CallForm, turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The turns in the shape that a template of this form takes: ids, arguments and contents of turns with calls."""
    shown: list[dict[str, Any]] = []
    for turn in turns:
        turn = dict(turn)
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_call(form, call) for call in turn["tool_calls"]]
            if form.null_text and (not turn["content"] or not form.text_before):
                turn["content"] = None
        if form.has_ids and "tool_call_id" in turn:
            turn["tool_call_id"] = short_id(turn["tool_call_id"])
        shown.append(turn)
    return shown


def turn_text(form: CallForm, calls: Sequence[Mapping[str, Any]]) -> str:
    """The text of a turn's calls, for chat templates that show no calls; empty if there are none."""
    if not calls:
        return ""
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return form.calls(named, ids=[short_id(call.get("id", "")) for call in calls])


def _call(form: CallForm, call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if form.json_text:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    ids = {"id": short_id(call.get("id", ""))} if form.has_ids else {}
    return {**call, **ids, "function": function}


def short_id(call_id: str) -> str:
    """An id for templates that show ids: the id itself if it is `ID_LENGTH` letters and digits, otherwise a digest."""
    if len(call_id) == ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:ID_LENGTH]
