"""Functions that a conversation may call, and its calls: a user's row in the form of chat templates."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from mbd_core.json_text import parse_json

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL_FIELDS = ("type", "function", "name", "description", "parameters", "strict")
CALL_FIELDS = ("id", "type", "index", "function", "name", "arguments")
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
VALUES = ("default", "const", "enum", "examples", "example")
"""Keywords of a JSON Schema whose values are data, where null is a value."""

ConversationMessages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


def parsed(value: Any, what: str) -> Any:
    """A value, or the list or object that a JSON text holds."""
    is_json = isinstance(value, str) and value.lstrip("\ufeff \t\r\n")[:1] in ("[", "{")
    return parse_json(value, what, unique=True) if is_json else value


def as_objects(value: Any, what: str) -> list[Mapping[str, Any]] | None:
    """A list of objects; `None` for any other value.

    The list or each object may be a JSON text. A single object is a list of one.
    """
    value = parsed(value, what)
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, list | tuple):
        return None
    items = [parsed(item, what) for item in value]
    return items if all(isinstance(item, Mapping) for item in items) else None


def tools_of(row: Mapping[str, Any], column: str = "tools", ignored: Collection[str] = ()) -> Tools:
    """The functions of a row's column, a list or its JSON text, as serving shows them to a chat template.

    `ignored`: fields of a tool that say nothing, like `tools.returns`. Raises `ValueError` for a value that is no
    function.
    """
    value = row.get(column)
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return []
    tools = as_objects(value, f"its {column!r}")
    if tools is None:
        raise ValueError(f"its {column!r} are no list of functions, each with a name")
    return [_tool(tool, column, ignored) for tool in tools]


def _tool(tool: Mapping[str, Any], column: str, ignored: Collection[str]) -> dict[str, Any]:
    function = parsed(tool.get("function") or tool, f"its {column!r}")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"its {column!r} are no list of functions, each with a name")
    name = function["name"]
    for field, value in {**tool, **function}.items():
        if field not in TOOL_FIELDS and value is not None and f"{column}.{field}" not in ignored:
            raise ValueError(
                f"its function {name!r} has the field {field!r}, which chat templates do not get; leave it out "
                f"with --ignore-columns {column}.{field}"
            )
    parameters = parsed(function.get("parameters"), f"its function {name!r}: the text of its 'parameters'")
    if isinstance(parameters, Mapping) and (loose := _loose_properties(parameters)):
        raise ValueError(
            f"its function {name!r} has 'parameters' that are no JSON schema, since {loose} is no keyword; write the "
            "parameters under 'properties'"
        )
    if not isinstance(parameters, Mapping | None):
        raise ValueError(f"its function {name!r} has 'parameters' that are no JSON schema, an object")
    description = {} if function.get("description") is None else {"description": function["description"]}
    schema = {"type": "object", **(NO_PARAMETERS if parameters is None else _without_nulls(parameters))}
    shown = {"type": "function", "function": {"name": name, **description, "parameters": schema}}
    _check_json(shown, f"its function {name!r}")
    return shown


def _loose_properties(schema: Mapping[str, Any]) -> str:
    """The first parameter of an object whose keys are parameters, not a JSON Schema's keywords; "" for a schema."""
    is_schema = any(isinstance(schema.get(name), str) for name in ("type", "$ref"))
    if is_schema or any(name in schema for name in (*MAPS_OF_SCHEMAS, "anyOf", "oneOf", "allOf", "required")):
        return ""
    return next((repr(name) for name, part in schema.items() if isinstance(part, Mapping)), "")


def _without_nulls(schema: Any) -> Any:
    """A JSON schema without keywords that are null, which mean nothing there; `default: null` and such stay."""
    if isinstance(schema, list):
        return [_without_nulls(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: value
        if name in VALUES
        else {key: _without_nulls(part) for key, part in value.items() if part is not None}
        if name in MAPS_OF_SCHEMAS and isinstance(value, Mapping)
        else _without_nulls(value)
        for name, value in schema.items()
        if value is not None or name in VALUES
    }


def read_call(call: Any, number: int) -> dict[str, Any]:
    """A call of message `number`. Its arguments may be an object or the object's JSON text."""
    whole = parsed(call, f"its message {number} has a call whose text")
    function = parsed(whole.get("function") or whole, "its call") if isinstance(whole, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        arguments = parse_json(
            arguments or "{}", f"its message {number} has a call whose arguments' text", unique=True
        )
    if (
        not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
        or not isinstance(arguments, dict)
    ):
        raise ValueError(f"its message {number} has a call that lacks a function's name, or arguments in an object")
    for field, value in {**whole, **function}.items():
        if field not in CALL_FIELDS and value is not None:
            raise ValueError(f"its message {number} has a call with the field {field!r}, which is not read; remove it")
    if not isinstance(whole.get("id"), str | int | None):
        raise ValueError(
            f"its message {number} has a call whose 'id' is neither a text nor a number, but {whole['id']!r}; "
            "make it a text"
        )
    if whole.get("type") not in (None, "function"):
        raise ValueError(f"its message {number} has a call of the type {whole['type']!r}; only functions are called")
    _check_json(arguments, f"its message {number} has a call whose arguments")
    id_field = {} if whole.get("id") is None else {"id": str(whole["id"])}
    return {**id_field, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _check_json(value: Any, what: str) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from None


def without_padding(messages: ConversationMessages, tools: Tools) -> int:
    """Removes null arguments that the functions' schemas have no place for; returns their number.

    Tools that write rows of many functions into one struct add the other functions' arguments as null. They also turn
    an integer into 1.0 if another row has another type there; where the schema has an integer, it becomes an integer
    again.
    """
    properties = {tool["function"]["name"]: tool["function"]["parameters"].get("properties") for tool in tools}
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments, known = call["function"]["arguments"], properties.get(call["function"]["name"])
            if not isinstance(known, Mapping):
                continue
            padded = [name for name, value in arguments.items() if value is None and not _admits_null(known, name)]
            for name in padded:
                del arguments[name]
            for name, value in arguments.items():
                if isinstance(value, float) and value.is_integer() and _kind(known, name) == "integer":
                    arguments[name] = int(value)
            count += len(padded)
    return count


def _kind(properties: Mapping[str, Any], name: str) -> Any:
    schema = properties.get(name)
    return schema.get("type") if isinstance(schema, Mapping) else None


def _admits_null(properties: Mapping[str, Any], name: str) -> bool:
    schema = properties.get(name)
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    return (
        not any(keyword in schema for keyword in ("type", "enum", "const"))
        or (kinds == "null" or (isinstance(kinds, list) and "null" in kinds) or schema.get("nullable") is True)
        or (kinds is None and None in (schema.get("enum") or [schema.get("const")]))
    )


def in_order_of_calls(messages: ConversationMessages) -> ConversationMessages:
    """Results of calls in the order of the calls, where both have ids, because templates show no ids."""
    results: ConversationMessages = []
    places: dict[str, int] = {}
    for message in messages:
        if message["role"] != "tool":
            places = {call["id"]: place for place, call in enumerate(message.get("tool_calls", ())) if "id" in call}
        elif "tool_call_id" in message and places:
            if message["tool_call_id"] not in places:
                raise ValueError(f"its result of {message['tool_call_id']!r} is of no call in the turn before")
            place_of_call = places[message["tool_call_id"]]
            index = len(results)
            while (
                index
                and results[index - 1]["role"] == "tool"
                and places.get(results[index - 1].get("tool_call_id", ""), -1) > place_of_call
            ):
                index -= 1
            results.insert(index, message)
            continue
        results.append(message)
    return results
