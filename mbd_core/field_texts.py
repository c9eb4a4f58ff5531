"""A field's value from a text, as a command line or a sweep's grid gives it."""

import difflib
import json
import typing
from collections.abc import Mapping
from typing import Any

from mbd_core.fields import Field, load
from mbd_core.json_text import parse_json


def form_of(item: Field) -> Mapping[str, Any]:
    """The schema of a value that a command line can give: no object with fields of its own, and not null."""
    forms = item.schema.get("anyOf", [item.schema])
    return next(form for form in forms if form.get("type") != "null" and "$ref" not in form)


def field_at(path: str, items: Mapping[str, Field], name: str) -> Field:
    """The field with a path. Raises `ValueError`, whose message begins with `name`, for a path without a field."""
    if path in items:
        return items[path]
    inside = [known for known in items if known.startswith(f"{path}.")]
    near = inside[:1] or difflib.get_close_matches(path, items, n=1, cutoff=0.5)
    hint = f"; it holds fields, as {near[0]}" if inside else f"; is '{near[0]}' meant?" if near else ""
    raise ValueError(f"{name}: there is no field {path}{hint}")


def value_of(item: Field, given: Any, name: str, joint: str = " ") -> Any:
    """A field's value from a text, or from texts. The message of its `ValueError` begins with name, joint and text."""
    form, value = form_of(item), given
    is_list = form.get("type") == "array"
    is_path = item.flag.opened_by is not None or item.flag.positional or form.get("format") == "path"
    if is_path and (given == "" or (isinstance(given, list | tuple) and "" in given)):  # Path("") is the folder itself
        what = item.flag.metavar if item.flag.positional else name
        raise ValueError(f"{what}: an empty name is no folder, file or model; give a name or a path")
    if isinstance(given, str) and (form.get("type") == "object" or (is_list and given.startswith("["))):
        value = parse_json(given, f"{name}{joint}{given!r}")
    elif is_list and given is not None:
        texts = _listed(given, name, once="prefixItems" not in form) if isinstance(given, str) else given
        value = [_scalar(text, item_form(form)) for text in texts]
    elif isinstance(given, str):
        value = _scalar(given, form)
    try:
        return load(item.hint, value)
    except ValueError as error:
        said, values = "null" if given is None else given, str(error).rpartition(" must be ")[2]
        raise ValueError(f"{name}{joint}{said} must be {values}") from None


def item_form(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a list's items."""
    return typing.cast(Mapping[str, Any], form.get("items") or form["prefixItems"][0])


def _listed(text: str, name: str, *, once: bool) -> list[str]:
    """The items of a text with commas. Raises `ValueError` if there is none, or with `once` if an item repeats."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ValueError(f"{name} names nothing; give at least one, separated by commas")
    return list(dict.fromkeys(items)) if once else items


def _scalar(text: str, form: Mapping[str, Any]) -> Any:
    """A text as a number, a switch or null; else the text itself, which its field accepts or refuses."""
    if form.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return float(text) if text.lstrip("+-").lower() in ("inf", "infinity", "nan") else text
