"""A JSON schema's type and bounds as the API reference words them."""

import json
from collections.abc import Mapping
from typing import Any


def type_text(schema: Mapping[str, Any], *, null: bool = True) -> str:
    """The types that a value may have. Without `null` that one is left out, unless there is no other: it is what a
    field of a request has that was left out."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    forms = schema.get("anyOf") or schema.get("oneOf")
    if forms:
        named = [form for form in forms if null or form != {"type": "null"}]
        return " or ".join(dict.fromkeys(map(type_text, named)))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        values = [value for value in schema["enum"] if null or value is not None] or [None]
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    kind = schema.get("type", "any value")
    if isinstance(kind, list):
        return " or ".join(_named({**schema, "type": one}) for one in kind)
    return _named(schema)


def _named(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "any value")
    if kind == "array":
        text = f"list of {_item_text(schema['items'])}" if schema.get("items") else "list"
        return text + _range(schema.get("minItems"), schema.get("maxItems"), " items")
    if kind == "string":
        pattern = f", `{schema['pattern']}`" if "pattern" in schema else ""
        return "string" + _range(schema.get("minLength"), schema.get("maxLength"), " characters") + pattern
    if kind in ("integer", "number"):
        least, most = schema.get("minimum"), schema.get("maximum")
        if "exclusiveMaximum" in schema:
            most = schema["exclusiveMaximum"] - 1
        return kind + _range(least, most, "")
    return str(kind)


def _item_text(items: Mapping[str, Any]) -> str:
    """What a list has, in brackets where it could be read with what stands behind it."""
    text = type_text(items)
    return f"({text})" if " or " in text or ", " in text else text


def _range(least: float | None, most: float | None, unit: str) -> str:
    if least in (None, 0) and most is None:
        return f", at least {least}{unit}" if least is not None and not unit else ""
    if most is None:
        return f", at least {_number(least)}{unit}"
    if least is None or (least == 0 and unit):
        return f", at most {_number(most)}{unit}"
    return f", {_number(least)} to {_number(most)}{unit}"


def _number(value: float | None) -> str:
    powers = {2**63 - 1: "2^63 - 1", -(2**63): "-2^63", 2**31 - 1: "2^31 - 1", 2**53 - 1: "2^53 - 1"}
    return powers.get(value, f"{value:,}") if isinstance(value, int) else f"{value:g}"
