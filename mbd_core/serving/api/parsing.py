"""From a JSON body to a typed request: strict types, bounded lists, and the first mistake as an error.

Bodies are parsed on the event loop that all clients share. So the cost of a body is estimated before it is parsed,
lists are bounded, and parsing stops at the first wrong item of a list.
"""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from mbd_core.serving.api.documented_fields import DOCUMENTED
from mbd_core.serving.api.errors import ApiError, FieldError, clip, value_text

MAX_QUOTES = 100_000  # quotes of a body around keys and texts, without escaped quotes inside texts
MAX_BRACKETS = 50_000  # brackets of a body outside texts
MAX_COMMAS = 600_000  # commas of a body outside texts; each token id has one
MAX_ERRORS = 1000  # a body with more mistakes gets an error without details
MAX_STOPS = 16
MAX_TEXT_PARTS = 1024  # parts of a message
MAX_IDS = 2**18  # token ids of one prompt
MAX_PROMPTS = 128  # prompts of one body: the default of `--body-prompts`
MOST_PROMPTS = 4096  # the largest value of `--body-prompts`
NEAR = 0.75  # least similarity (of 1) between an unknown name and the suggested name


class Strict(BaseModel):
    """Part of a request: a string is not a number, an unknown field is an error, and objects are immutable.

    A field's docstring describes it in the OpenAPI document and in docs/reference/api.md. `one_form` names the fields
    of `FORMS` that have only one form in this class.
    """

    one_form: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def items(most: int, *, least: int | None = None) -> Any:
    """The bounds of a list. Validation stops at the first wrong item, because a million errors took half a minute."""
    return Field(min_length=least, max_length=most, fail_fast=True)


class Only:
    """Marks a field that has no implementation. It accepts null and `values`, which change nothing; `instead` names
    the replacement for other values."""

    def __init__(self, *values: Any, instead: str = "") -> None:
        self._values, self._instead = values, instead

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        advice = f": {self._instead}" if self._instead else ""
        return {"enum": [*self._values, None], "description": f"changes nothing; any other value is refused{advice}"}

    @property
    def verdict(self) -> str:
        """How the field is treated, for a table."""
        choices = " or ".join(f"`{json.dumps(value)}`" for value in self._values)
        advice = f": {self._instead}" if self._instead else ""
        return f"refused{f', but for {choices}' if choices else ''}{advice}"

    def _check(self, value: Any) -> Any:
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self._values):
            return value
        choices = " or ".join(json.dumps(v) for v in self._values)
        remedy = self._instead or f"leave it out or give {choices or 'null'}"
        raise ValueError(f"{value_text(value)} is not supported; {remedy}")


class Ignored:
    """Marks a field that changes nothing, whatever its value.

    For values outside `silent`, the reply (`mbd.notes`) says `why`; without `why` it says nothing.
    """

    def __init__(self, why: str = "", *, silent: tuple[Any, ...] = ()) -> None:
        self._why, self._silent = why, silent

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        said = f", which `mbd.notes` says: {self._why}" if self._why else ""
        return {**handler(schema), "description": f"changes nothing{said}"}

    @property
    def verdict(self) -> str:
        """How the field is treated, for a table."""
        return f"changes nothing, noted: {self._why}" if self._why else "changes nothing"

    def note(self, value: Any) -> str:
        """The reply's note on a value; empty if there is none."""
        return "" if value is None or any(value == silent for silent in self._silent) else self._why


def ignored_notes(request: Strict) -> list[str]:
    """The reply's notes on fields of a request that change nothing."""
    marks = _ignored_fields(type(request))
    notes = ((name, mark.note(getattr(request, name))) for name, mark in marks)
    return [f"{name} has no effect: {note}" for name, note in notes if note]


@cache
def _ignored_fields(kind: type[Strict]) -> tuple[tuple[str, Ignored], ...]:
    fields = kind.model_fields.items()
    return tuple((name, mark) for name, field in fields for mark in field.metadata if isinstance(mark, Ignored))


R = TypeVar("R", bound=Strict)


def parse(kind: type[R], body: bytes) -> R:
    """The request in a JSON body. Raises `ApiError` (400) that names the first wrong field."""
    _check_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error, kind) from None


def _check_size(body: bytes) -> None:
    """Count the quotes, brackets and commas on which the parsing time depends; counting is fast."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_most(MAX_QUOTES, "quotes", plain.count(b'"'))
    outside = b"".join(plain.split(b'"')[::2])
    _check_most(MAX_BRACKETS, "brackets", outside.count(b"[") + outside.count(b"{"))
    _check_most(MAX_COMMAS, "commas", outside.count(b","))


def _check_most(most: int, marks: str, number: int) -> None:
    if number > most:
        message = f"the body has more than {most} {marks}, the most that are read here; send less at once"
        raise ApiError(400, message, code="invalid_json")


SUBJECT = re.compile(r"^[A-Z]\w+ should ")  # how pydantic's messages begin

# If a field may have several forms, pydantic reports an error for each form; the client gets these messages instead.
FORMS = {
    "prompt": f"must be a string, a list of strings, a list of at most {MAX_IDS} token ids (0 or more), or a list of "
    f"such lists; at most {MOST_PROMPTS} prompts",
    "stop": f"must be a string or a list of at most {MAX_STOPS} strings",
    "speed": 'must be a number from 0 to 1, or in /v1/messages "standard"',
    "template": 'must be a list of strings and holes, {"hole": N}',
    "guided_json": "must be a JSON schema, as an object or as its text",
    "json_schema": "must be a JSON schema, as an object or as its text",
    "json": "must be a JSON schema, as an object or as its text",
    "tool_choice": 'must be "none", "auto", "required", {"type": "function", "function": {"name": NAME}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}; the tools are '
    "functions",
}
# For some values the form is chosen first, and only its errors are reported. If no form fits, the client gets these.
NO_FORM = {
    "content": f"must be a string or a list of at most {MAX_TEXT_PARTS} text parts; images, audio and files are not "
    "read",
    "input": "must be a string or a list of items: messages of text, calls, results, reasoning; images and files "
    "are not read",
    "output": f"must be a string or a list of at most {MAX_TEXT_PARTS} text parts; images and files are not read",
    "response_format": 'must have the type "text", "json_object" or "json_schema"',
}
NO_ITEM = {
    "input": "must be an object whose type is message, function_call, function_call_output, custom_tool_call, "
    "custom_tool_call_output, reasoning, or an item of OpenAI's own tools",
    "tools": "must be an object whose type is function, or another kind of OpenAI's, which is left out here",
}


def is_form(label: Any) -> bool:
    """Whether a step of pydantic's path to a value is a form of the value, such as `(list)`, not a client's key."""
    return isinstance(label, str) and label.startswith("(")


def text_or_list(value: Any) -> str:
    """The form of a value that is a text or a list."""
    return "(text)" if isinstance(value, str) else "(list)"


def by_type(forms: Mapping[str, str], *, default: str | None = None) -> Discriminator:
    """Chooses an object's form by its `type`; a bare text has the form `(word)`, and an unknown type has no form."""

    def form(value: Any) -> str | None:
        if isinstance(value, str):
            return "(word)"
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return forms.get(kind) if isinstance(kind, str) else None

    return Discriminator(form)


def validation_error(error: ValidationError, kind: type[Strict]) -> ApiError:
    """The client's error for a pydantic error on a request of this kind: its first mistake."""
    if error.error_count() > MAX_ERRORS:  # listing them takes long
        return ApiError(400, f"more than {MAX_ERRORS} mistakes, unknown fields among them", code="unknown_field")
    first = error.errors(include_url=False)[0]
    kind_of_error, message = first["type"], _own_words(first["msg"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return cause
    if kind_of_error == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {message}", code="invalid_json")
    path = [clip(str(p)) for p in first["loc"] if not is_form(p)]
    if path[:1] == ["response_format"] and len(path) > 1:
        path[1:2] = []  # the name of its form
    forms = FORMS.keys() - kind.one_form
    several = next((i for i, p in enumerate(path) if p in forms and i + 1 < len(path)), None)
    code = "invalid_value"
    if kind_of_error == "extra_forbidden":
        message, code = _unknown(path, kind), "unknown_field"
    elif kind_of_error == "missing":
        message, code = "this field is required", "missing_field"
    elif several is not None:
        path = path[: several + 1]
        message = FORMS[path[-1]]
    elif path and (kind_of_error.startswith("union_tag") or kind_of_error in ("list_type", "string_type")):
        field = path[-2] if path[-1].isdecimal() and len(path) > 1 else path[-1]
        if field in NO_ITEM and field != path[-1]:
            message = NO_ITEM[field]
        elif field in NO_FORM:
            path = path[: len(path) - (field != path[-1])]
            tag = first.get("ctx", {}).get("tag")
            message = NO_FORM[field] if tag is None else f"has the type {value_text(tag)}; it {NO_FORM[field]}"
    if not path:
        return ApiError(400, message, code=code)
    return FieldError(".".join(path), message, code=code)


def _own_words(message: str) -> str:
    """pydantic's message as a clause after the field: "must be at least 1" for "Input should be at least 1"."""
    message = SUBJECT.sub("must ", message.removeprefix("Value error, ")).partition(", unable to")[0]
    return message.replace(" after validation", "").replace("valid dictionary", "object")


def _unknown(path: list[str], kind: type[Strict]) -> str:
    """The message on an unknown field: the route that has the field, or the nearest known name."""
    name, root, nested = path[-1], *_field_names(kind)
    if len(path) == 1 and (route := next((r for r, names in DOCUMENTED.items() if name in names), None)):
        return f"unknown field; it belongs to {route}"
    near = get_close_matches(name, root if len(path) == 1 else nested, n=1, cutoff=NEAR)
    return f"unknown field; did you mean {near[0]}?" if near else "unknown field"


@cache
def _field_names(kind: type[Strict]) -> tuple[list[str], list[str]]:
    """The fields of a request, and the fields of its parts."""
    schema = kind.model_json_schema()
    parts = {name for part in schema.get("$defs", {}).values() for name in part.get("properties", ())}
    return list(schema["properties"]), sorted(parts)
