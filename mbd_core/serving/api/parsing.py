"""From a JSON body to a typed request: strict types, bounded lists, and the first mistake as an error.

Bodies are read on the loop that serves everybody. So what their reading costs is counted before anything is built,
lists are bounded, and the first wrong item of a list ends it.
"""

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from mbd_core.serving.api.errors import ApiError, FieldError, clip, value_text

MAX_QUOTES = 100_000  # of a body, around its keys and texts; those in texts are escaped
MAX_BRACKETS = 50_000  # of a body, those in its texts not counted
MAX_COMMAS = 600_000  # the same; token ids have one each
MAX_ERRORS = 1000  # that are looked at
MAX_STOPS = 16
MAX_TEXT_PARTS = 1024  # of a message
MAX_IDS = 2**18  # of one prompt
MAX_PROMPTS = 128  # of one body, unless the server says otherwise
MOST_PROMPTS = 4096  # that it may say


class Strict(BaseModel):
    """Part of a request: a string is not a number, an unknown field is an error, and nothing is changed later.

    A field's docstring describes it in the OpenAPI document and in docs/reference/api.md.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def items(most: int, *, least: int | None = None) -> Any:
    """The bounds of a list. An item that is wrong is the list's only error: a million of them took half a minute."""
    return Field(min_length=least, max_length=most, fail_fast=True)


class Only:
    """Mark of a field that would change the result: it takes the values that change nothing, or null."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._values, None], "description": "changes nothing; any other value is refused"}

    def _check(self, value: Any) -> Any:
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self._values):
            return value
        choices = " or ".join(json.dumps(v) for v in self._values) or "null"
        raise ValueError(f"{value_text(value)} is not supported; leave it out or give {choices}")


R = TypeVar("R", bound=Strict)


def parse(kind: type[R], body: bytes) -> R:
    """The request in a JSON body; raises `ApiError` (400) naming the first field that is wrong."""
    _check_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise validation_error(error) from None


def _check_size(body: bytes) -> None:
    """Count, at the speed of memory, what the time to build a body grows with."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_most(MAX_QUOTES, "quotes", plain.count(b'"'))
    outside = b"".join(plain.split(b'"')[::2])
    _check_most(MAX_BRACKETS, "brackets", outside.count(b"[") + outside.count(b"{"))
    _check_most(MAX_COMMAS, "commas", outside.count(b","))


def _check_most(most: int, marks: str, number: int) -> None:
    if number > most:
        message = f"the body has more than {most} {marks}, the most that are read here; send less at once"
        raise ApiError(400, message, code="invalid_json")


# Where a field may have several forms, pydantic reports an error for each form; the client gets these instead.
FORMS = {
    "input": "must be a string or a list of items: messages of text, function_call, function_call_output; images and "
    "files are not read",
    "prompt": f"must be a string, a list of strings, a list of at most {MAX_IDS} token ids (0 or more), or a list of "
    f"such lists; at most {MOST_PROMPTS} prompts",
    "content": f"must be a string or a list of at most {MAX_TEXT_PARTS} text parts; images, audio and files are not "
    "read",
    "stop": f"must be a string or a list of at most {MAX_STOPS} strings",
    "template": 'must be a list of strings and holes, {"hole": N}',
    "guided_json": "must be a JSON schema, as an object or as its text",
    "tool_choice": 'must be "none", "auto", "required" or {"type": "function", "function": {"name": NAME}}',
}


def validation_error(error: ValidationError) -> ApiError:
    """What a client reads of pydantic's error: its first mistake."""
    if error.error_count() > MAX_ERRORS:  # to list them takes long
        return ApiError(400, f"more than {MAX_ERRORS} mistakes, unknown fields among them", code="unknown_field")
    first = error.errors(include_url=False)[0]
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return cause
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {message}", code="invalid_json")
    path = [clip(str(p)) for p in first["loc"]]
    if path[:1] == ["response_format"]:
        path[1:2] = []  # which of its forms it is
    several = next((i for i, p in enumerate(path) if p in FORMS and i + 1 < len(path)), None)
    if kind == "extra_forbidden":
        message, code = "unknown field", "unknown_field"
    elif kind == "missing":
        message, code = "this field is required", "missing_field"
    else:
        code = "invalid_value"
        if several is not None:
            path = path[: several + 1]
            message = FORMS[path[-1]]
    if not path:
        return ApiError(400, message, code=code)
    return FieldError(".".join(path), message, code=code)
